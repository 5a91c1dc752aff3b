"""All ways to compute GateLoop give the same outputs, last state and gradients."""

import pytest
import torch
from tests import gradients
from torch.autograd import gradgradcheck

from recurra import gate_loop
from recurra.ops.gate_loop import operator
from recurra.ops.gate_loop.reference import segment_products

SLOW = pytest.mark.slow
LENGTHS = (1, 17, 130, *(pytest.param(length, marks=SLOW) for length in (2, 64)))
"""Blocks have 16 or 32 steps, chunks 64: the first, one between and the last."""
PLAIN = {
    "recurrent": ("recurrent", "auto"),
    "attention": ("attention", "auto"),
    "scan": ("scan", "auto"),
    "chunk": ("chunk", "auto"),
    "chunk in torch": ("chunk", "reference"),
}
MODES = {**PLAIN, "scan in torch": ("scan", "reference"), "auto": ("auto", "auto")}
FUSED_MODES = {"fused": ("fused", "auto"), "fused in torch": ("fused", "reference")}
NAMES = ("y", "last state", "dq", "dk", "dv", "da", "dstate")


def modes_for(inputs):
    real = not any(x.is_complex() for x in inputs[:3])
    max_headed = inputs.q.shape[-1] == inputs.v.shape[-1] == 1
    return MODES | (FUSED_MODES if real and max_headed else {})


def differentiate(function, inputs):
    return gradients.differentiate(lambda *x: function(type(inputs)(*x)), inputs)


def run(inputs, mode, backend="auto"):
    return differentiate(lambda x: gate_loop(x.q, x.k, x.v, x.a, state=x.state, mode=mode, backend=backend), inputs)


def assert_near(actual, expected, tolerance, what):
    gradients.require_near(actual, expected, tolerance, [f"{name} of {what}" for name in NAMES], mixed=True)


@pytest.mark.parametrize("length", LENGTHS)
def test_all_modes_agree(case, length):
    """Float64 to 1e-10, float32 to 1e-5 relative: outputs, last state and all gradients, the incoming state's too."""
    inputs = case.draw(length)
    expected, single = run(inputs, "recurrent"), inputs.to(torch.float32)
    for name, (mode, backend) in modes_for(inputs).items():
        if mode != "recurrent":
            assert_near(run(inputs, mode, backend), expected, 1e-10, f"{name} in float64")
        actual = run(single, mode, backend)
        assert {x.dtype.to_real() for x in actual} == {torch.float32}
        assert_near(actual, expected, 1e-5, f"{name} in float32")


@pytest.mark.parametrize("length", [2, 40, *(pytest.param(length, marks=SLOW) for length in (1, 17))])
def test_all_modes_compute_equation_9(case, length, equation_9):
    inputs = case.draw(length)
    expected = equation_9(inputs)
    for mode, backend in modes_for(inputs).values():
        y, last = gate_loop(*inputs[:4], state=inputs.state, mode=mode, backend=backend)
        torch.testing.assert_close(y, expected[0], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(last, expected[1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mode", ["attention", "chunk"])
def test_attention_as_the_paper_writes_it(mode):
    """Y = ((Q * Pi)(K * Pi^-1)^T . M) V, GateLoop (14)-(21), with the cumulative product and its inverse."""
    q, k, a = torch.randn(3, 2, 80, 1, 3, dtype=torch.complex128)
    a = torch.polar(0.9 + 0.2 * torch.rand_like(a.real), a.angle())  # so that no product underflows
    v = torch.randn(2, 80, 1, 4, dtype=torch.float64)
    pi = a[:, :, 0].cumprod(1)
    scores = (q[:, :, 0] * pi) @ (k[:, :, 0] / pi).transpose(1, 2)
    y, _ = gate_loop(q, k, v, a, mode=mode)
    torch.testing.assert_close(y[:, :, 0], scores.tril() @ v[:, :, 0].to(scores.dtype), rtol=1e-10, atol=1e-10)


def test_without_a_state_it_starts_from_zeros(case):
    inputs = case.draw(9)
    for mode, backend in modes_for(inputs).values():
        expected = gate_loop(*inputs[:4], state=torch.zeros_like(inputs.state), mode=mode, backend=backend)
        torch.testing.assert_close(gate_loop(*inputs[:4], mode=mode, backend=backend), expected, rtol=0, atol=0)


def test_a_stream_may_be_cut_anywhere(case):
    """Outputs, last state and gradients, with a different mode for each piece."""
    inputs = case.draw(41)
    modes = list(modes_for(inputs).values())

    def in_pieces(x):
        outputs, state, start = [], x.state, 0
        for i, stop in enumerate((1, 2, 5, 9, 11, 30, 41)):
            mode, backend = modes[i % len(modes)]
            piece = [tensor[:, start:stop] for tensor in x[:4]]
            y, state = gate_loop(*piece, state=state, mode=mode, backend=backend)
            outputs.append(y)
            start = stop
        return torch.cat(outputs, 1), state

    assert_near(differentiate(in_pieces, inputs), run(inputs, "recurrent"), 1e-11, "pieces")


@pytest.mark.parametrize("length", [3, 40, *(pytest.param(length, marks=SLOW) for length in (1, 17))])
def test_gates_of_exactly_zero(case, length):
    """A transition of 0 forgets everything, but its own gradient is not 0: for some, several in a block, and all."""
    for share in (0.2, 1.0):
        inputs = case.draw(length)
        chosen = torch.rand(inputs.a.shape) < share
        chosen[:, -1] = True  # nothing comes after the newest transition
        inputs = inputs._replace(a=torch.where(chosen, torch.zeros_like(inputs.a), inputs.a))
        expected = run(inputs, "recurrent")
        assert expected[5][chosen].abs().min() > 0
        for name, (mode, backend) in modes_for(inputs).items():
            assert_near(run(inputs, mode, backend), expected, 1e-10, f"{name}, {share} zeros")


@pytest.mark.parametrize("gate", [1e-30, 2e-38, pytest.param(1e-12, marks=SLOW)])
def test_tiny_gates(case, gate):
    """The product of two transitions of 1e-30 is 0 in float32: nothing may divide by it."""
    inputs = case.draw(35)
    inputs = inputs._replace(a=inputs.a / inputs.a.abs() * gate).to(torch.float32)
    expected = run(inputs.to(torch.float64), "recurrent")
    for name, (mode, backend) in modes_for(inputs).items():
        actual = run(inputs, mode, backend)
        assert all(x.isfinite().all() for x in actual), name
        assert_near(actual, expected, 1e-5, name)


def test_tiny_gates_beside_others(case):
    """After a drop by 1e-30 the old state can come back: transitions above 1 lift it again."""
    inputs = case.draw(12)
    inputs.a[:, 2] *= 1e-30
    inputs.a[:, 5] *= 1e-12
    inputs.a[:, 7:11] *= 1e10
    expected = run(inputs, "recurrent")
    for name, (mode, backend) in modes_for(inputs).items():
        assert_near(run(inputs, mode, backend), expected, 1e-10, name)


@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_gates_of_magnitude_one_and_above(case, scale):
    inputs = case.draw(40)
    inputs = inputs._replace(a=inputs.a / inputs.a.abs() * scale)
    expected = run(inputs, "recurrent")
    for name, (mode, backend) in modes_for(inputs).items():
        assert_near(run(inputs, mode, backend), expected, 1e-10, name)


def test_products_that_underflow_over_a_long_sequence():
    """Pi_n of the paper is 0 in float64 after a few hundred steps of 0.1; neighbours still see each other."""
    q, k, v = torch.randn(3, 1, 500, 2, 1, dtype=torch.float64)
    a = torch.full_like(q, 0.1)
    assert a.prod() == 0
    for mode in ("attention", "chunk"):
        y, _ = gate_loop(q, k, v, a, mode=mode)
        torch.testing.assert_close(y, gate_loop(q, k, v, a, mode="recurrent")[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("d_a", [1, 3])
def test_chunks_keep_neighbours_apart_by_gates_of_a_millionth(d_a):
    """Over a chunk these transitions multiply to 1e-384, which no float holds; neighbours still see each other."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 130, 2, 3)
    a = torch.full((2, 130, 2, d_a), 1e-6).requires_grad_()
    y, last = gate_loop(q, k, v, a, mode="chunk")
    expected, expected_last = gate_loop(q.double(), k.double(), v.double(), a.double(), mode="recurrent")
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last.double(), expected_last, rtol=1e-5, atol=1e-6)
    grad, expected_grad = (torch.autograd.grad(z.square().sum(), a)[0] for z in (y, expected))
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("length", "d_qk", "d_v", "in_torch", "by_kernels"),
    [(1, 64, 64, "recurrent", "recurrent"), (64, 64, 64, "chunk", "chunk"), (63, 64, 64, "scan", "chunk"),
     (1024, 16, 16, "chunk", "chunk"), (4096, 8, 8, "scan", "chunk"), (2, 2, 1, "scan", "chunk"),
     (4096, 1, 1, "fused", "fused")],
)  # fmt: skip
def test_auto_takes_what_was_measured_as_the_fastest(length, d_qk, d_v, in_torch, by_kernels):
    q, v = torch.empty(1, length, 1, d_qk), torch.empty(1, length, 1, d_v)
    a = torch.empty(1, length, 1, 1)
    assert operator._choose_mode("auto", q, q, v, a, None, "reference") == in_torch
    assert operator._choose_mode("auto", q, q, v, a, None, "numba") == by_kernels
    if by_kernels == "fused":  # only Numba's kernels form the imaginary half of y
        for backend, mode in (("numba", "fused"), ("reference", "scan")):
            assert operator._choose_mode("auto", q, q, v, a.cfloat(), None, backend) == mode
            assert operator._choose_mode("auto", q, q, v, a, a[:, :1].cfloat(), backend) == mode
        assert operator._choose_mode("fused", q, q, v, a.cfloat(), None, "numba") == "fused"


@pytest.mark.parametrize("size", [1, 3])
def test_auto_takes_any_backend_for_a_single_step(size):
    q, k, v = torch.randn(3, 2, 1, 2, size, dtype=torch.float64)
    a, h = torch.rand(2, 1, 2, 1, dtype=torch.float64), torch.randn(2, 2, size, size, dtype=torch.float64)
    y, last = gate_loop(q, k, v, a, state=h, backend="numba")
    expected, expected_last = gate_loop(q, k, v, a, state=h, mode="recurrent")
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(last, expected_last, rtol=1e-14, atol=1e-14)


def test_segment_products():
    a = torch.randn(2, 5, 3, dtype=torch.float64)
    a[0, 2, 1] = 0
    products = segment_products(a)
    for i in range(5):
        for j in range(5):
            expected = a[:, j + 1 : i + 1].prod(1) if i >= j else torch.zeros(2, 3, dtype=torch.float64)
            torch.testing.assert_close(products[:, i, j], expected, rtol=1e-14, atol=0)


def _twice():
    """Every mode with one kind of input by default, and a mode for every kind."""
    names = "max-headed, real", "max-headed, complex gates", "complex vector gates"
    for i, mode in enumerate(("attention", "scan", "chunk", "recurrent", "fused")):
        yield from (pytest.param(mode, name, marks=() if j == i % 3 else SLOW) for j, name in enumerate(names))


@pytest.mark.parametrize(("mode", "name"), _twice())
def test_second_derivatives_by_differences(mode, name, cases):
    if mode == "fused" and not name.startswith("max-headed"):
        mode = "auto"
    inputs = [x.requires_grad_() for x in cases[name]._replace(heads=1, d_v=1).draw(2, batch=1)]
    assert gradgradcheck(lambda q, k, v, a, state: gate_loop(q, k, v, a, state=state, mode=mode), inputs)


@pytest.mark.parametrize("mode", ["recurrent", "scan", "chunk", "attention", "fused"])
def test_the_same_tensor_in_several_places(mode):
    """x as q, k and v, and transitions computed from it, differentiated twice."""

    def gradients(mode):
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(1, 6, 2, 1).requires_grad_()
        y, state = gate_loop(x, x, 2 * x, torch.polar(torch.sigmoid(x), x), mode=mode)
        y, state = gate_loop(x, x, y.real, torch.sigmoid(x), state=state, mode=mode)
        (first,) = torch.autograd.grad(y.abs().square().sum() + state.abs().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return first.detach(), second

    torch.testing.assert_close(gradients(mode), gradients("recurrent"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_are_computed_in_float32(case, dtype):
    inputs = case.draw(9).to(torch.float32)
    inputs = inputs._replace(**{n: x.to(dtype) for n, x in zip("qkva", inputs) if not x.is_complex()})
    wide = type(inputs)(*(x if x.is_complex() else x.float() for x in inputs))
    for name, (mode, backend) in modes_for(inputs).items():
        y, last = gate_loop(*inputs[:4], state=inputs.state, mode=mode, backend=backend)
        y_wide, last_wide = gate_loop(*wide[:4], state=wide.state, mode=mode, backend=backend)
        assert y.dtype == (torch.complex64 if y_wide.is_complex() else dtype), name
        assert torch.equal(y, y_wide.to(y.dtype)), name
        assert torch.equal(last, last_wide), name
        assert last.dtype in (torch.float32, torch.complex64)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)], ids=str)
def test_empty_input(shape):
    for mode, dtype in ((m, t) for m in MODES for t in (torch.float16, torch.float32, torch.complex128)):
        q, k, v = (torch.ones(*shape, d) for d in (2, 2, 3))
        q, k, v = (x.half() if dtype == torch.float16 else x for x in (q, k, v))
        a = torch.ones(*shape, 1, dtype=dtype)
        y, state = gate_loop(q, k, v, a, mode=MODES[mode][0], backend=MODES[mode][1])
        assert y.shape == (*shape, 3)
        assert y.dtype == dtype
        assert state.shape == (shape[0], shape[2], 2, 3)
        assert state.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    entering = torch.randn(2, 3, 1, 1)
    nothing = torch.ones(2, 0, 3, 1)
    for mode in ("recurrent", "scan", "attention", "fused"):
        assert torch.equal(gate_loop(*[nothing] * 4, state=entering, mode=mode)[1], entering), "no step, the same state"


def test_strided_and_expanded_input(case):
    """Chunks of one projection, transitions shared by all steps, a transposed layout: as a layer may pass them."""
    inputs = case.draw(7)
    strided = []
    for x in inputs:
        twice = torch.stack([x, x + 1], -1)[..., 0]  # an element and the next one are not neighbours
        strided.append(twice.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 3 else twice)
    shared = inputs.a[:1, :1].expand_as(inputs.a)
    for name, (mode, backend) in modes_for(inputs).items():
        assert_near(run(type(inputs)(*strided), mode, backend), run(inputs, "recurrent"), 1e-11, name)
        y, last = gate_loop(*inputs[:3], shared, state=inputs.state, mode=mode, backend=backend)
        expected = gate_loop(*inputs[:3], shared.contiguous(), state=inputs.state, mode="recurrent")
        torch.testing.assert_close((y, last), expected, rtol=1e-11, atol=1e-11)


def test_conjugated_input(case):
    inputs = case.draw(7)
    conjugated = type(inputs)(*(x.conj() for x in inputs))
    straight = type(inputs)(*(x.conj().resolve_conj() for x in inputs))
    for name, (mode, backend) in modes_for(inputs).items():
        assert_near(run(conjugated, mode, backend), run(straight, "recurrent"), 1e-11, name)


def test_auto_takes_the_fastest_mode_that_applies(monkeypatch):
    taken = []
    for name in list(operator._MODES):
        original = operator._MODES[name]
        spy = lambda *arguments, name=name, original=original: taken.append(name) or original(*arguments)  # noqa: E731
        monkeypatch.setitem(operator._MODES, name, spy)
    by_heads = operator.chunk_by_heads
    monkeypatch.setattr(operator, "chunk_by_heads", lambda *x: taken.append("chunk") or by_heads(*x))
    ones, wide = torch.ones(1, 4, 2, 1), torch.ones(1, 4, 2, 3)
    gate_loop(ones, ones, ones, ones)
    gate_loop(ones, ones, ones, ones + 0j)
    gate_loop(ones + 0j, ones, ones, ones)
    gate_loop(wide, wide, wide, ones)
    gate_loop(wide[:, :1], wide[:, :1], wide[:, :1], ones[:, :1])
    gate_loop(ones[:, :1], ones[:, :1], ones[:, :1], ones[:, :1])
    assert taken == ["fused", "fused", "scan", "chunk", "recurrent", "fused"]


@pytest.mark.parametrize("mode", ["scan", "chunk", "attention"])
def test_autocast_does_not_reach_inside(mode):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 70, 2, 4)
    a = torch.rand(2, 70, 2, 1)
    y, last = gate_loop(q, k, v, a, mode=mode)
    with torch.autocast("cpu", torch.bfloat16):
        under = gate_loop(q, k, v, a, mode=mode)
    assert torch.equal(under[0], y)
    assert torch.equal(under[1], last)


@pytest.mark.parametrize("mode", ["recurrent", "scan", "chunk", "attention"])
def test_the_last_state_keeps_no_other_alive(mode):
    q, k, v = torch.randn(3, 1, 70, 2, 4)
    _, last = gate_loop(q, k, v, torch.rand(1, 70, 2, 1), mode=mode)
    assert last.untyped_storage().nbytes() == last.numel() * last.element_size()
