"""What torch operators around kernels share: they refuse derivatives, which an `autograd.Function` around them has."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_derivatives(library: torch.library.Library, name: str) -> None:
    """Make the bare operator recurra::`name` raise when it is asked for a derivative, instead of returning zeros.

    That happens where a tracer looks past the functions that carry the derivatives: in a compiled jvp, or for the
    gradient of a gradient inside a compiled function.
    """
    operator = getattr(torch.ops.recurra, name).default

    def refuse(*arguments: Any) -> Any:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        asked = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if forward_ad._current_level >= 0 and forward_ad._is_fwd_grad_enabled():
            asked = asked or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
        if asked:
            raise NotImplementedError(
                f"recurra::{name} has no derivative of this kind here: differentiate outside torch.compile, or use "
                f'backend="reference"'
            )
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    library.impl(name, refuse, "Autograd")


def with_known_signature(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Keep the signature of a Function's forward: otherwise `apply` computes it again at every call (0.1 ms)."""
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]
    return function


def differentiable_gradients(
    reference: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Compute a backward pass through plain torch, so that its result can be differentiated in turn.

    Args:
        reference: computes the outputs of the kernel from its inputs.
        inputs: the tensors saved by the forward pass.
        gradients: those of the outputs; None for an output whose gradient is zero.

    Returns:
        The gradient of each input, None where it needs none.
    """
    with torch.enable_grad():
        # Aliases, because one input can be another or come from it, and each must get only its own share.
        aliases = [None if x is None else x.view_as(x) for x in inputs]
        outputs = reference(*aliases)
        pairs = [(y, dy) for y, dy in zip(outputs, gradients) if y is not None and dy is not None and y.requires_grad]
        wanted = [x for x in aliases if x is not None and x.requires_grad]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs], wanted, [dy for _, dy in pairs], create_graph=True, materialize_grads=True
            )
        )
        return tuple(next(found) if x is not None and x.requires_grad else None for x in aliases)
