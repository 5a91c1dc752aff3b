"""h_t = a_t h_{t-1} + b_t: values, on every backend, type, shape and memory layout; derivatives have their own file."""

import doctest
import functools
import inspect
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import recurra.ops.scan.operator as linear
from recurra import linear_scan

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
HALF = (torch.float16, torch.bfloat16)
REAL = (torch.float32, torch.float64)
BACKENDS = ("reference", "numba")
ODD_SIZES = (1, 2, 3, 5, 8, 12, 15, 16, 17, 31, 33, 63, 65, 100)


def assert_near(actual, expected):
    """The same numbers, up to rounding in `actual`'s own type."""
    tolerance = 50 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=tolerance, atol=tolerance)


def assert_same_bits(actual, expected):
    """The same numbers bit for bit: NaN at the same places, zeros and infinities of the same sign."""
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    known = ~actual.isnan()
    assert torch.equal(actual[known], expected[known])
    assert torch.equal(actual[known].signbit(), expected[known].signbit())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("a_type", DTYPES, ids=str)
@pytest.mark.parametrize("b_type", DTYPES, ids=str)
def test_every_mix_of_types(a_type, b_type, backend, gates, plain_scan):
    """Every pair, and the type of h0 changes with them."""
    h0_type = DTYPES[(DTYPES.index(a_type) + DTYPES.index(b_type)) % len(DTYPES)]
    a, b, h0 = gates(2, 5, 17, dtype=a_type), torch.randn(2, 5, 17, dtype=b_type), torch.randn(2, 17, dtype=h0_type)
    for start in (None, h0):
        h = linear_scan(a, b, start, backend=backend)
        given = (a, b) if start is None else (a, b, h0)
        assert h.dtype == functools.reduce(torch.promote_types, (x.dtype for x in given))
        if h.dtype in HALF:
            assert torch.equal(h, linear_scan(*(x.float() for x in given), backend=backend).to(h.dtype))
        else:
            assert_near(h, plain_scan(*given))


def _both_ways_in_turn():
    """Every size in every type, by default in one direction."""
    for i, (channels, (j, dtype)) in enumerate(itertools.product(ODD_SIZES, enumerate(DTYPES[2:]))):
        quick = (i // 4 + j) % 2 == 0
        for reverse in (False, True):
            yield pytest.param(channels, dtype, reverse, marks=() if reverse == quick else pytest.mark.slow)


@pytest.mark.parametrize(("channels", "dtype", "reverse"), _both_ways_in_turn(), ids=str)
def test_odd_sizes(channels, dtype, reverse, gates, plain_scan):
    for batch, length in ((1, 1), (3, 2), (2, 17)):
        a, b = gates(batch, length, channels, dtype=dtype), torch.randn(batch, length, channels, dtype=dtype)
        for h0 in (None, torch.randn(batch, channels, dtype=dtype)):
            h = linear_scan(a, b, h0, reverse=reverse, backend="numba")
            assert_near(h, plain_scan(a, b, h0, reverse))
            if not dtype.is_complex:
                assert_same_bits(h, linear_scan(a, b, h0, reverse=reverse, backend="reference"))


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 4),
    length=st.integers(1, 40),
    channels=st.integers(1, 200),
    dtype=st.sampled_from(REAL),
    reverse=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_equals_the_reference_bit_for_bit(batch, length, channels, dtype, reverse, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b, h0 = (
        torch.randn(shape, dtype=dtype, generator=generator)
        for shape in ((batch, length, channels), (batch, length, channels), (batch, channels))
    )
    numba, reference = (linear_scan(a, b, h0, reverse=reverse, backend=name) for name in ("numba", "reference"))
    assert_same_bits(numba, reference)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((), (2, 5, 3)),
        ((1,), (2, 5, 3)),
        ((3,), (2, 5, 3)),
        ((5, 3), (2, 5, 3)),
        ((5, 1), (2, 5, 3)),
        ((2, 1, 3), (2, 5, 3)),
        ((1, 5, 1), (2, 5, 3)),
        ((2, 5, 1), (2, 5, 3)),
        ((2, 5, 4, 1), (2, 5, 4, 3)),
        ((4, 1), (2, 5, 4, 3)),
        ((2, 1, 4, 3), (2, 5, 4, 3)),
        ((2, 5, 4, 1, 1), (2, 5, 4, 3, 2)),
        ((), (2, 5)),
        ((5,), (2, 5)),
        ((2, 1), (2, 5)),
        ((2, 5), (2, 5)),
    ],
    ids=str,
)
def test_a_broadcasts(a_shape, b_shape, backend, gates, plain_scan):
    for dtype in (torch.float64, torch.complex128):
        a, b = gates(*a_shape, dtype=dtype), torch.randn(b_shape, dtype=torch.float64)
        h0 = torch.randn(b_shape[:1] + b_shape[2:], dtype=torch.float64)
        for reverse in (False, True):
            h = linear_scan(a, b, h0, reverse=reverse, backend=backend)
            assert h.shape == b_shape
            assert_near(h, plain_scan(a, b, h0, reverse))


def _layouts(dtype):
    """Ways in which a (3, 6, 20) tensor can lie in memory."""
    draw = lambda *shape: torch.randn(shape, dtype=dtype)  # noqa: E731
    return {
        "contiguous": draw(3, 6, 20),
        "channels first": draw(3, 20, 6).transpose(1, 2),
        "time first": draw(6, 3, 20).transpose(0, 1),
        "all turned round": draw(20, 6, 3).permute(2, 1, 0),
        "every other channel": draw(3, 6, 40)[..., ::2],
        "every other step": draw(3, 12, 20)[:, ::2],
        "every other sequence": draw(6, 6, 20)[::2],
        "backwards": draw(3, 6, 20)[:, torch.arange(5, -1, -1)],
        "part of a projection": draw(3, 6, 60)[..., 20:40],
        "off the alignment": draw(3 * 6 * 20 + 1)[1:].view(3, 6, 20),
        "one row for all": draw(20).expand(3, 6, 20),
        "one step for all": draw(3, 1, 20).expand(3, 6, 20),
        "one sequence for all": draw(1, 6, 20).expand(3, 6, 20),
        "one number for all": draw(1, 1, 1).expand(3, 6, 20),
        "one channel for all": draw(3, 6, 1).expand(3, 6, 20),
        "conjugated": draw(3, 6, 20).conj(),
        "negated": torch.randn(3, 6, 20, dtype=dtype.to_complex()).conj().imag,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
def test_memory_layouts(dtype, plain_scan):
    layouts = _layouts(dtype)
    straight = torch.randn(3, 6, 20, dtype=dtype)
    for name, tensor in layouts.items():
        before = tensor.clone()
        first = tensor[:, 2]
        for reverse in (False, True):
            for arguments in ((tensor, straight), (straight, tensor), (tensor, tensor), (straight, straight, first)):
                scaled = (arguments[0] * 0.3 if arguments[0] is straight else arguments[0], *arguments[1:])
                h = linear_scan(*scaled, reverse=reverse, backend="numba")
                expected = plain_scan(*scaled, reverse=reverse)
                distance = (h - expected).abs().max() / expected.abs().max()
                assert distance < 5 * torch.finfo(dtype).eps, name
                if not dtype.is_complex:
                    reference = linear_scan(*scaled, reverse=reverse, backend="reference")
                    assert torch.equal(h, reference), name
        assert torch.equal(tensor, before), f"{name}: the input was written to"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0), (0, 0), (2, 0, 3, 4)], ids=str)
def test_empty_input(shape, backend):
    for a_type, b_type in itertools.product(DTYPES, DTYPES):
        b, h0 = torch.randn(shape, dtype=b_type), torch.randn(shape[:1] + shape[2:], dtype=b_type, requires_grad=True)
        a = torch.full((), 0.5, dtype=a_type, requires_grad=True)
        for start in (None, h0):
            h = linear_scan(a, b, start, backend=backend)
            assert (h.shape, h.dtype) == (shape, torch.promote_types(a_type, b_type))
        gradients = torch.autograd.grad(h.abs().sum(), (a, h0))
        assert [g.count_nonzero().item() for g in gradients] == [0, 0]


# No complex numbers near overflow: torch does not always round their products in the same order.
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, 1e-30, 1e-44, torch.inf, -torch.inf, torch.nan, -1e30])


@settings(max_examples=80, deadline=None)
@given(dtype=st.sampled_from(DTYPES[2:]), reverse=st.booleans(), seed=st.integers(0, 2**31))
def test_nan_and_infinity_travel_as_in_the_reference(dtype, reverse, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        if not dtype.is_complex:
            return SPECIAL[torch.randint(len(SPECIAL), shape, generator=generator)].to(dtype)
        parts = SPECIAL[torch.randint(len(SPECIAL) - 1, (*shape, 2), generator=generator)].to(dtype.to_real())
        return torch.view_as_complex(parts)

    a, b, h0 = draw(2, 3, 53), draw(2, 3, 53), draw(2, 53)
    numba, reference = (linear_scan(a, b, h0, reverse=reverse, backend=name) for name in ("numba", "reference"))
    if dtype.is_complex:  # torch adds complex numbers as x + (1 + 0i) y, so one infinite part makes the other NaN
        finite = reference.isfinite()
        assert torch.equal(numba.isfinite(), finite)
        torch.testing.assert_close(numba[finite], reference[finite], rtol=1e-6, atol=1e-44)
    else:
        assert_same_bits(numba, reference)


def test_a_long_slow_decay_stays_near_float64(plain_scan):
    length = 65_536
    # The stated distance is 2e-3, relative to the largest |h|. Two roundings in each step allow L eps = 8e-3 at worst;
    # measured: 9.4e-4 for a constant input, whose errors all point in one direction, 1e-4 to 6e-4 for random ones.
    a = torch.full((1, length, 2), 1 - 1e-7)
    b = torch.stack([torch.full((length,), 0.1), torch.randn(length)], 1)[None]
    h, exact = linear_scan(a, b, backend="numba"), plain_scan(a, b)
    assert torch.equal(h, linear_scan(a, b, backend="reference"))
    distance = (h.double() - exact).abs().amax(1) / exact.abs().amax(1)
    assert (distance < 2e-3).all()


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_out(dtype, gates):
    a, b, h0 = gates(2, 9, 21, dtype=dtype), torch.randn(2, 9, 21, dtype=dtype), torch.randn(2, 21, dtype=dtype)
    for reverse in (False, True):
        expected = linear_scan(a, b, h0, reverse=reverse)
        out = torch.full((4, 9, 21), float("nan"), dtype=dtype)
        result = linear_scan(a, b, h0, reverse=reverse, out=out[1:3])
        assert result.data_ptr() == out[1].data_ptr()
        assert torch.equal(out[1:3], expected)
        assert out[::3].isnan().all(), "it wrote outside of `out`"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(2, 9, 1), (2, 9, 21), (1, 40, 1000), (3, 60, 131)], ids=str)
def test_out_may_be_an_input(shape, dtype, threads, gates, set_threads):
    """A number of a or b is read before its place is written, and h0 before everything, on all threads."""
    a, b, h0 = gates(*shape, dtype=dtype), torch.randn(shape, dtype=dtype), torch.randn(shape[::2], dtype=dtype)
    set_threads(threads)
    for reverse in (False, True):
        expected = linear_scan(a, b, h0, reverse=reverse, backend="reference")
        close = {"rtol": 0, "atol": 0} if not dtype.is_complex else {}  # torch's own complex product may be fused
        x = b.clone()
        torch.testing.assert_close(linear_scan(a, x, h0, reverse=reverse, out=x), expected, **close)
        x = a.clone()
        torch.testing.assert_close(linear_scan(x, b, h0, reverse=reverse, out=x), expected, **close)
        for step in (0, shape[1] // 2, -1):
            out = torch.randn(shape, dtype=dtype)
            out[:, step] = h0
            found = linear_scan(a, b, out[:, step], reverse=reverse, out=out)
            torch.testing.assert_close(found, expected, **close)
        x = a[0].clone()  # for one sequence, the same memory where it has no batch
        out = x.unsqueeze(0)
        expected = linear_scan(a[:1], b[:1], h0[:1], reverse=reverse, backend="reference")
        found = linear_scan(x, b[:1], h0[:1], reverse=reverse, out=out)
        torch.testing.assert_close(found, expected, **close)


def test_a_graph_that_has_saved_out_refuses_to_go_on():
    """Its gradients would be those of other numbers."""
    out, weight = torch.ones(1, 4, 80), torch.ones(1, 4, 80, requires_grad=True)
    loss = (out * weight).sum()
    with torch.no_grad():
        linear_scan(torch.full((80,), 0.5), torch.ones(1, 4, 80), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.compile
def test_out_is_written_in_a_traced_program():
    def into(a, b, out):
        return linear_scan(a, b, out=out)

    a, b, out = torch.full((3,), 0.5), torch.ones(1, 4, 3), torch.empty(1, 4, 3)
    with torch.no_grad():
        found = torch.compile(into, backend="aot_eager")(a, b, out)
    assert torch.equal(found, linear_scan(a, b))
    assert torch.equal(out, found)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_every_element_is_written(dtype, gates, plain_scan):
    for shape in ((1, 1, 1), (2, 3, 15), (2, 4, 67), (3, 2, 5, 7)):
        a, b = gates(*shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        for reverse in (False, True):
            assert_near(linear_scan(a, b, reverse=reverse, backend="numba"), plain_scan(a, b, reverse=reverse))


def test_auto_takes_the_kernel_on_the_cpu(monkeypatch):
    taken = []
    monkeypatch.setattr(linear, "differentiable_scan", lambda a, b, *_: taken.append("numba") or b)
    monkeypatch.setattr(linear, "linear_scan_reference", lambda a, b, *_: taken.append("reference") or b)
    for backend in ("auto", "numba", "reference"):
        linear_scan(torch.ones(3), torch.ones(2, 4, 3), backend=backend)
    assert taken == ["numba", "numba", "reference"]


def test_the_docstring_is_right():
    function = inspect.unwrap(linear_scan)
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(function, "linear_scan", globs=dict(vars(linear))):
        runner.run(test)
    assert runner.summarize().failed == 0
    assert runner.tries > 0
