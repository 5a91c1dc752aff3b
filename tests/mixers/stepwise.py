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


def _has_gradient(part: Tensor) -> bool:
    return part.requires_grad


def first_mixer(name: str, d_model: int, **options: Any) -> nn.Module:
    """A layer as a language model starts it, which draws all projections anew."""
    config = LanguageModelConfig(7, None, 1, d_model, 0, mixer=name, mixer_options=options)
    return LanguageModel(config).blocks[0].mixer  # type: ignore[return-value]
