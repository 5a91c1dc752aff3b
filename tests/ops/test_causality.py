"""Every mode of every operator over time: no later input changes an earlier result, be it an outlier, inf or NaN."""

import pytest
import torch

from recurra import delta_rule, gate_loop, linear_scan
from recurra.ops.delta_rule import generalised_delta_rule
from recurra.ops.gate_loop.reference import softmax_attention

ROUNDING = 8 * torch.finfo(torch.float32).eps


def inputs(*sizes: int, length: int = 150) -> list[torch.Tensor]:
    """Tensors over time with gates in (0, 1) last."""
    *others, gate = (torch.randn(2, length, 2, size) for size in sizes)
    return [*others, torch.sigmoid(gate + 2)]


def times(name: str) -> tuple[int, int]:
    """The number of steps and a late one: chunks have 64 steps, but a loop over steps needs few."""
    return (20, 15) if "recurrent" in name or "reference" in name else (150, 130)


def turning(function, **options):
    """The function with gates that turn, too."""
    return lambda q, k, v, a: function(q, k, v, torch.polar(a, 3 * a), **options)


GATED = {
    f"gate_loop, {mode}, {name}": (lambda *x, mode=mode: gate_loop(*x, mode=mode)[0], sizes)
    for mode in ("recurrent", "scan", "chunk", "attention")
    for name, sizes in {"a gate a head": (3, 3, 5, 1), "a gate a channel": (3, 3, 5, 3)}.items()
}
TURNING = {
    f"gate_loop, {mode}, complex": (turning(lambda *x, mode=mode: gate_loop(*x, mode=mode)[0]), (3, 3, 5, 3))
    for mode in ("recurrent", "scan", "chunk", "attention")
}
DELTA = {
    f"delta_rule, {mode}": (lambda q, k, v, b, a, mode=mode: delta_rule(q, k, v, a, b, mode=mode)[0], (3, 3, 5, 1, 1))
    for mode in ("recurrent", "chunk", "fused")
}
GENERALISED = {
    f"generalised_delta_rule, {backend}": (
        lambda q, k, v, r, z, a, backend=backend: generalised_delta_rule(q, k, v, a, r, z / 9, backend=backend)[0],
        (3, 3, 5, 3, 3, 3),
    )
    for backend in ("reference", "numba")
}
CASES = {
    **GATED,
    **TURNING,
    **DELTA,
    **GENERALISED,
    "gate_loop, fused": (lambda *x: gate_loop(*x, mode="fused")[0], (1, 1, 1, 1)),
    "linear_scan": (lambda b, a: linear_scan(a, b), (5, 5)),
    "linear_scan, reference": (lambda b, a: linear_scan(a, b, backend="reference"), (5, 5)),
    "softmax_attention": (softmax_attention, (3, 3, 5, 3)),
    "softmax_attention, window": (lambda *x: softmax_attention(*x, window=7), (3, 3, 5, 1)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recording", [False, True], ids=["without gradients", "with gradients"])
def test_a_later_input_changes_no_result(name: str, recording: bool):
    (function, sizes), (length, step) = CASES[name], times(name)
    tensors = inputs(*sizes, length=length)

    def results(number: int | None, value: float) -> torch.Tensor:
        changed = [x.clone() for x in tensors]
        if number is not None:
            changed[number][0, step] = value
        y = function(*(x.requires_grad_(recording) for x in changed)).detach()
        assert number is None or not torch.isfinite(torch.tensor(value)) or y.isfinite().all()
        return y[:, :step]

    expected = results(None, 0.0)
    limit = ROUNDING * float(expected.abs().max())
    for number in range(len(tensors)):
        is_gate = number == len(tensors) - 1
        for value in (1.0,) if is_gate else (1e6, torch.inf, torch.nan):
            torch.testing.assert_close(results(number, value), expected, rtol=0, atol=limit)


@pytest.mark.parametrize("name", CASES)
def test_an_earlier_results_gradient_changes_no_later_one(name: str):
    (function, sizes), (length, late) = CASES[name], times(name)
    tensors = [x.requires_grad_() for x in inputs(*sizes, length=length)]
    y = function(*tensors)
    given, step = torch.randn_like(y), length - late
    expected = torch.autograd.grad(y, tensors, given, retain_graph=True)
    for value in (1e6, torch.inf, torch.nan):
        changed = given.clone()
        changed[0, step] = value
        found = torch.autograd.grad(y, tensors, changed, retain_graph=True)
        for mine, right in zip(found, expected):
            limit = ROUNDING * float(right.abs().max())
            torch.testing.assert_close(mine[0, step + 1 :], right[0, step + 1 :], rtol=0, atol=limit)
            torch.testing.assert_close(mine[1], right[1], rtol=0, atol=limit)
        assert all(mine.isfinite().all() for mine in found) == (value == 1e6)


def test_attention_forgets_an_infinity_with_its_window():
    q, k, v, a = inputs(3, 3, 5, 1)
    expected = softmax_attention(q, k, v, a, window=7)
    v = v.clone()
    v[0, 100] = torch.inf
    y = softmax_attention(q, k, v, a, window=7)
    assert y[0, 100:107].isnan().all()
    torch.testing.assert_close(y[0, 107:], expected[0, 107:])
    torch.testing.assert_close(y[1], expected[1])


@pytest.mark.parametrize("mode", ["chunk", "attention", "fused"])
def test_from_an_infinity_on_nothing_is_finite(mode):
    """A step that was left out of the products is not forgotten: what would have seen it says so."""
    for function, sizes in ((delta_rule, (3, 3, 5, 1, 1)), (gate_loop, (3, 3, 5, 1))):
        q, k, v, *gates = inputs(*sizes)
        if mode == ("attention" if function is delta_rule else "fused"):
            continue
        v[0, 30, 0, 0] = torch.inf
        y, last = function(q, k, v, *gates[::-1], mode=mode)
        assert not y[0, 30:, 0].isfinite().all(-1).any()
        assert not last[0].isfinite().all()
        assert y[1].isfinite().all()
        assert last[1].isfinite().all()
