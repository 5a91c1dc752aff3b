"""What tests of operators compare: outputs, and the gradients of a fixed random combination of them."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def differentiate(
    function: Callable[..., Tensor | Sequence[Tensor]], inputs: Iterable[Tensor], chosen: Iterable[int] | None = None
) -> list[Tensor]:
    """Return the outputs of `function(*inputs)`, and the gradients of a combination of them, or of those `chosen`.

    The weights do not depend on types and devices.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, dtype=torch.complex128, generator=generator) for y in outputs]
    weights = [(w if y.is_complex() else w.real).to(y) for w, y in zip(weights, outputs)]
    value = sum(
        (weights[i].conj() * outputs[i]).real.sum(dtype=torch.float64)
        for i in (range(len(outputs)) if chosen is None else chosen)
    )
    return [*outputs, *torch.autograd.grad(value, leaves, materialize_grads=True)]


def require_near(
    found: Iterable[Tensor],
    expected: Iterable[Tensor],
    tolerance: float,
    names: Sequence[str] = (),
    mixed: bool = False,
) -> None:
    """Compare results to a share of the largest number of each; with `mixed`, types may differ if alike complex."""
    for number, (mine, right) in enumerate(zip(found, expected, strict=True)):
        name = names[number] if names else f"result {number}"
        assert mine.shape == right.shape, name
        assert mine.is_complex() == right.is_complex() if mixed else mine.dtype == right.dtype, name
        wide = torch.complex128 if right.is_complex() else torch.float64
        distance, largest = (mine.to(wide) - right.to(wide)).abs().max(), right.to(wide).abs().max()
        assert distance <= tolerance * largest.clamp_min(1e-300), f"{name}: {distance:.1e}"


def require_same_gradients(
    found: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor], leaves: Sequence[Tensor], tolerance: float
) -> None:
    """Compare results, and within ten times the tolerance the gradients of a random combination for `leaves`."""
    found, expected = ([x] if isinstance(x, Tensor) else x for x in (found, expected))
    weights = [torch.randn_like(x) for x in expected]
    gradients = []
    for results in (found, expected):
        torch.testing.assert_close(tuple(results), tuple(expected), rtol=tolerance, atol=tolerance)
        total = sum((w.conj() * x).real.sum() for w, x in zip(weights, results, strict=True))
        gradients.append(torch.autograd.grad(total, leaves, materialize_grads=True))
    torch.testing.assert_close(*gradients, rtol=10 * tolerance, atol=10 * tolerance)
