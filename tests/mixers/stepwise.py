"""Comparing a mixer with its recurrence written out step by step, in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors

Loop = Callable[[nn.Module, Tensor, Any], tuple[Tensor, Any]]
"""`(layer, x, state) -> (y, last state)`."""


def require_same(
    layer: nn.Module, by_a_loop: Loop, x: Tensor, state: Any, tolerance: float = 1e-11, constant: Sequence[str] = ()
) -> None:
    """Compare outputs, the last state and the gradients of x, the state and every weight; `layer` is in float64.

    Gradients are of a loss of outputs and last state, and may differ ten times as much. Parts of the state that are
    `constant` have none.
    """
    x = x.detach().requires_grad_()
    parts = zip(state._fields, state)
    state = type(state)(*(part.detach().requires_grad_(name not in constant) for name, part in parts))
    results = [layer(x, state), by_a_loop(layer, x, state)]
    (y, last), (expected, expected_last) = results
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(tuple(last), tuple(expected_last), rtol=tolerance, atol=tolerance)
    weights, leaves = torch.randn_like(y), [x, *filter(_has_gradient, state), *layer.parameters()]
    losses = [(weights * out).sum() + sum(part.sin().sum() for part in tensors(end)) for out, end in results]
    found, wanted = (torch.autograd.grad(loss, leaves) for loss in losses)
    for one, other in zip(found, wanted):
        assert other.abs().max() > 0, "a loss that does not depend on a leaf proves nothing about it"
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=10 * tolerance)


def require_padding_skipped(layer: nn.Module, d_model: int) -> None:
    """Padding, NaN or not, neither writes nor forgets; `layer` is in float64."""
    mask = torch.tensor([[0, 1, 0, 0, 1, 1, 0, 1]]).bool()
    x = torch.randn(1, 8, d_model, dtype=torch.float64)
    alone, last = layer(x[mask][None])
    y, state = layer(x.masked_fill(~mask[..., None], torch.nan), mask=mask)
    torch.testing.assert_close(y[mask], alone[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(tuple(state), tuple(last), rtol=1e-12, atol=1e-13)
    assert y[~mask].eq(0).all()


def require_float32_states(make: Callable[[], nn.Module], d_model: int, tolerance: float = 0.05) -> None:
    """A bfloat16 layer and a layer under autocast recur in float32 or complex64, near the layer in float32."""
    layer, x = make(), torch.randn(2, 30, d_model)
    expected, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        _, state = layer(x, state)
    half, carried = layer.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert _types(state) == _types(carried) <= {torch.float32, torch.complex64}
    for found in (y, half):
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def _has_gradient(part: Tensor) -> bool:
    return part.requires_grad


def _types(state: Sequence[Tensor]) -> set[torch.dtype]:
    return {part.dtype for part in tensors(state)}


def first_mixer(name: str, d_model: int, **options: Any) -> nn.Module:
    """A layer as a language model starts it, which draws all projections anew."""
    config = LanguageModelConfig(7, None, 1, d_model, 0, mixer=name, mixer_options=options)
    return LanguageModel(config).blocks[0].mixer  # type: ignore[return-value]
