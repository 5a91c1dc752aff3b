"""float16 and bfloat16 in the CPU kernels: states and gradients are those of a float32 scan, rounded once."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import recurra.ops.scan.operator as operator
from recurra import linear_scan
from recurra.ops._toolkit import vectors

_needs_float16 = pytest.mark.skipif(not vectors.converts_float16(), reason="no instructions for float16")
HALF = (pytest.param(torch.float16, marks=_needs_float16), torch.bfloat16)
SHAPES = ((1, 1, 64), (2, 2, 65), (3, 9, 80), (1, 17, 100), (2, 5, 131), (3, 2, 7, 33))
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.3, 3e-5, 1e-7, 6e4, -3e38, torch.inf, -torch.inf, torch.nan])


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """The types of the scans that the kernels for halves have run."""
    types, kernels = [], operator._kernels

    def counted(h, half=None):
        types.append(half)
        return kernels(h, half)

    monkeypatch.setattr(operator, "_kernels", counted)
    return types


def converted(a, b, h0=None, **options):
    """The scan in float32 between conversions."""
    return linear_scan(a.float(), b.float(), None if h0 is None else h0.float(), **options).to(b.dtype)


def draw(*shape, dtype, special=False):
    values = SPECIAL[torch.randint(len(SPECIAL), shape)] if special else torch.randn(shape)
    return values.to(dtype).requires_grad_()


def assert_same_bits(actual, expected, what=""):
    """NaN at the same places; all other numbers bit for bit."""
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan()), what
    known = ~actual.isnan()
    assert torch.equal(actual[known].view(torch.int16), expected[known].view(torch.int16)), what


def require_the_bits_of_a_conversion(inputs, dh, reverse, what):
    results = []
    for scan in (linear_scan, converted):
        h = scan(*inputs, reverse=reverse)
        results.append([h.detach(), *torch.autograd.grad(h, inputs, dh)])
    for name, mine, right in zip(("h", "da", "db", "dh0"), *results):
        assert_same_bits(mine, right, f"{name}, {what}")
    with torch.no_grad():
        assert_same_bits(linear_scan(*inputs, reverse=reverse), results[1][0], f"h without a gradient, {what}")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("special", [False, True])
def test_odd_sizes(dtype, special, taken):
    for shape, reverse in itertools.product(SHAPES, (False, True)):
        inputs = [draw(*s, dtype=dtype, special=special) for s in (shape, shape, shape[:1] + shape[2:])]
        dh = draw(*shape, dtype=dtype, special=special).detach()
        taken.clear()
        for given in (inputs, inputs[:2]):
            require_the_bits_of_a_conversion(given, dh, reverse, f"{shape}, reverse={reverse}")
        assert taken.count(dtype) == 2 * 3, "forward, backward, and forward without a gradient"


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_memory_layouts(dtype, taken):
    layouts = {
        "contiguous": draw(3, 6, 70, dtype=dtype),
        "channels first": draw(3, 70, 6, dtype=dtype).transpose(1, 2),
        "time first": draw(6, 3, 70, dtype=dtype).transpose(0, 1),
        "every other channel": draw(3, 6, 140, dtype=dtype)[..., ::2],
        "every other step": draw(3, 12, 70, dtype=dtype)[:, ::2],
        "off the alignment": draw(3 * 6 * 70 + 1, dtype=dtype)[1:].view(3, 6, 70),
        "one row for all": draw(70, dtype=dtype).expand(3, 6, 70),
        "one number for all": draw(1, 1, 1, dtype=dtype).expand(3, 6, 70),
    }
    straight, h0 = draw(3, 6, 70, dtype=dtype), draw(70, 3, dtype=dtype).T
    for (name, tensor), reverse in itertools.product(layouts.items(), (False, True)):
        for a, b, dh in itertools.permutations((tensor, straight, straight.flip(1))):
            require_the_bits_of_a_conversion((a, b, h0), dh.detach(), reverse, name)
    assert dtype in taken


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_transitions_that_broadcast(dtype, taken):
    """Their gradient is a sum, which is taken before it is rounded; without one there is nothing to convert."""
    b, dh = draw(3, 6, 70, dtype=dtype), torch.randn(3, 6, 70).to(dtype)
    for shape in ((), (70,), (6, 1), (3, 1, 70)):
        a = draw(*shape, dtype=dtype)
        mine, right = (torch.autograd.grad(scan(a, b), (a, b), dh) for scan in (linear_scan, converted))
        for one, other in zip(mine, right):
            assert_same_bits(one, other, shape)
        assert dtype not in taken
        assert_same_bits(linear_scan(a.detach(), b), converted(a, b), shape)
        assert taken.count(dtype) == 1
        taken.clear()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_packed_sequences_and_resets(dtype, taken):
    a, b, dh = draw(1, 9, 70, dtype=dtype), draw(1, 9, 70, dtype=dtype), torch.randn(1, 9, 70).to(dtype)
    h0 = draw(2, 70, dtype=dtype)
    borders, reset = torch.tensor([0, 4, 9]), torch.arange(9).eq(4)[None]
    for reverse in (False, True):
        for inputs, options in (
            ((a, b), {"reset": reset}),
            ((a, b), {"cu_seqlens": borders}),
            ((a, b, h0), {"cu_seqlens": borders}),
        ):
            results = [scan(*inputs, reverse=reverse, **options) for scan in (linear_scan, converted)]
            assert_same_bits(*results, options)
            for mine, right in zip(*(torch.autograd.grad(h, inputs, dh) for h in results)):
                assert_same_bits(mine, right, options)
    assert taken.count(dtype) == 2 * 2 * 2, "h0 enters through b in float32; all else stays as it is"


def test_second_derivatives_and_batches_of_gradients(taken):
    inputs = [
        draw(2, 70, 5, dtype=torch.bfloat16).transpose(1, 2),
        draw(2, 5, 70, dtype=torch.bfloat16),
        draw(2, 70, dtype=torch.bfloat16),
    ]
    dh = draw(2, 5, 70, dtype=torch.bfloat16)
    for reverse in (False, True):
        results = []
        for scan in (linear_scan, converted):
            h = scan(*inputs, reverse=reverse)
            first = torch.autograd.grad(h, inputs, dh, create_graph=True)
            total = sum(g.float().square().sum() for g in first) + h.float().sum()
            second = torch.autograd.grad(total, (*inputs, dh))
            batch = torch.stack([dh.detach(), -dh.detach()])
            batched = torch.autograd.grad(scan(*inputs, reverse=reverse), inputs, batch, is_grads_batched=True)
            results.append((first + batched, second))
        for mine, right in zip(*(first for first, _ in results)):
            assert_same_bits(mine, right)
        for mine, right in zip(*(second for _, second in results)):  # a's and h0's are sums of rounded parts
            close = 2 * torch.finfo(torch.bfloat16).eps
            torch.testing.assert_close(mine, right, rtol=close, atol=close * right.abs().max().item())
    assert torch.bfloat16 in taken


def test_gradients_that_have_no_numbers_of_their_own(taken):
    """The backward pass alone is watched, or its gradient is a lazy negative."""
    a, b = draw(2, 5, 70, dtype=torch.bfloat16), draw(2, 5, 70, dtype=torch.bfloat16)
    dh = torch.randn(2, 5, 70).bfloat16()
    right = torch.autograd.grad(converted(a, b), (a, b), -dh)
    h = linear_scan(a, b)
    with FlopCounterMode(display=False) as counter:
        watched = torch.autograd.grad(h, (a, b), -dh, retain_graph=True)
    negative = torch.autograd.grad(h, (a, b), torch._neg_view(dh))
    for mine in (watched, negative):
        for one, other in zip(mine, right):
            assert_same_bits(one, other)
    assert counter.get_total_flops() == 3 * dh.numel()
    assert taken.count(torch.bfloat16) == 1


def test_an_input_may_be_overwritten_as_in_float32():
    """b is not saved."""
    a, b = draw(2, 5, 70, dtype=torch.bfloat16), draw(2, 5, 70, dtype=torch.bfloat16)
    changed = b * 1
    h = linear_scan(a, changed)
    changed.zero_()
    right = torch.autograd.grad(converted(a, b).sum(), (a, b))
    assert_same_bits(torch.autograd.grad(h.sum(), a)[0], right[0])


def test_what_is_narrow_mixed_or_transformed_is_converted(taken, monkeypatch):
    a, b = draw(2, 5, 70, dtype=torch.float16), draw(2, 5, 70, dtype=torch.float16)
    for scan in (
        lambda: linear_scan(a[..., :63], b[..., :63]),
        lambda: linear_scan(a, b.float()),
        lambda: linear_scan(a, b.bfloat16()),
        lambda: torch.func.jvp(lambda b: linear_scan(a, b), (b,), (b,))[0],
        lambda: torch.func.vmap(linear_scan)(a[None], b[None])[0],
    ):
        assert scan().isfinite().all()
    monkeypatch.setattr(vectors, "converts_float16", lambda: False)
    assert_same_bits(linear_scan(a, b), converted(a, b))
    assert taken
    assert set(taken) == {None}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_rows_may_be_shared_out_among_jobs(dtype, monkeypatch):
    monkeypatch.setattr(operator, "span_of_job", lambda row, batch: 64)
    for shape, reverse in itertools.product(((1, 7, 131), (3, 4, 128)), (False, True)):
        inputs = [draw(*s, dtype=dtype) for s in (shape, shape, (shape[0], shape[2]))]
        require_the_bits_of_a_conversion(inputs, torch.randn(shape).to(dtype), reverse, shape)
