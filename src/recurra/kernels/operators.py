"""What torch operators around kernels share: where their derivatives come from, and who refuses to have any."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recurra.kernels.backends import choose_backend


def transforms_are_active() -> bool:
    """Return whether torch.func or forward derivatives are at work, which not every `autograd.Function` has rules for.

    Under torch.compile it is False, and the tracer takes the Function apart itself.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def are_batched(*gradients: Tensor | None) -> bool:
    """Return whether these gradients of a backward pass are a batch of gradients, which has no address.

    They come from torch.func or, with `is_grads_batched=True` and in `torch.autograd.functional` with `vectorize=True`,
    from torch's older vmap, which `transforms_are_active` does not see.
    """
    if torch.compiler.is_compiling():
        return False
    is_old_batch = getattr(torch._C._functorch, "is_legacy_batchedtensor", None)  # a private name, which may go
    return transforms_are_active() or (
        is_old_batch is not None and any(is_old_batch(g) for g in gradients if g is not None)
    )


def has_numbers(x: Tensor) -> bool:
    """Return whether x has memory that a kernel may read by its address, and nobody records or counts operators.

    A fake tensor has none, nor does a tracer's; under a dispatch mode, what is made of x may be fake though x is not.
    """
    recorded = torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0
    return not recorded and type(x) in (Tensor, torch.nn.Parameter)


def float32_kernels_take(x: Tensor) -> bool:
    """Return whether Numba's kernels in a Function with eager rules alone take x: float32 on a CPU, not empty, and
    neither torch.compile, a tracer, torch.func nor forward derivatives at work."""
    return (
        not torch.compiler.is_compiling()
        and has_numbers(x)
        and x.dtype == torch.float32
        and x.is_cpu
        and bool(x.numel())
        and not transforms_are_active()
        and choose_backend("auto", x.device) == "numba"
    )


def register_derivatives(
    library: torch.library.Library, name: str, differentiable: Callable[..., Any] | None = None
) -> None:
    """Say what the bare operator recurra::`name` does when it is asked for a derivative, rather than return zeros.

    It stands without the Function around it in a program of torch.export, which may run with gradients: then
    `differentiable` computes the same and records them. Anything else is refused: forward derivatives of the operator,
    which a compiled jvp asks for, and without `differentiable` (in a backward pass) all of them.

    Args:
        library: where the operator is defined.
        name: its name.
        differentiable: takes the operator's arguments, of which trailing ones may be missing if they have defaults.
    """
    operator = getattr(torch.ops.recurra, name).default

    def call(*arguments: Any) -> Any:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        forwards = forward_ad._current_level >= 0 and forward_ad._is_fwd_grad_enabled()
        forwards = forwards and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
        backwards = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if backwards and not forwards and differentiable is not None:
            return differentiable(*arguments)
        if backwards or forwards:
            raise NotImplementedError(
                f"recurra::{name} has no derivative of this kind in a traced program: differentiate the model itself, "
                'outside torch.compile and torch.export, or use backend="reference"'
            )
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    library.impl(name, call, "Autograd")


def with_known_signature(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Keep the signature of a Function's forward: otherwise `apply` computes it again at every call (0.1 ms)."""
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]
    return function


def gradients_are_differentiated() -> bool:
    """Whether the result of a backward pass will be differentiated: in turn, or forward, along with a dual number."""
    return torch.is_grad_enabled() or (not torch.compiler.is_compiling() and forward_ad._current_level >= 0)


def differentiable_gradients(
    reference: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Compute a backward pass through plain torch, so that its result can be differentiated in turn.

    It computes as the kernel does, in the types of its inputs: autocast has had its say before them.

    Args:
        reference: computes the outputs of the kernel from its inputs.
        inputs: the tensors saved by the forward pass.
        gradients: those of the outputs; None for an output whose gradient is zero.

    Returns:
        The gradient of each input, None where it needs none.
    """
    device = next(x.device.type for x in inputs if x is not None)
    again = gradients_are_differentiated()  # else nobody asks for a graph: what comes is a batch of gradients
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        # Aliases, because one input can be another or come from it, and each must get only its own share.
        aliases = [None if x is None else x.view_as(x) for x in inputs]
        outputs = reference(*aliases)
        pairs = [(y, dy) for y, dy in zip(outputs, gradients) if y is not None and dy is not None and y.requires_grad]
        wanted = [x for x in aliases if x is not None and x.requires_grad]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs], wanted, [dy for _, dy in pairs], create_graph=again, materialize_grads=True
            )
        )
        return tuple(next(found) if x is not None and x.requires_grad else None for x in aliases)
