"""The selective scan by its two kernels, as torch operators with derivatives.

Inputs are those of `selective_scan`, all float32 on the CPU. Neither pass keeps the states of all steps: the forward
pass keeps every sixteenth, which takes as much memory as x with 16 modes, and the backward pass computes the others
again.
"""

from typing import Any

import torch
from torch import Tensor

from recurra.checks import kind_of, require_layout, sentence
from recurra.kernels.backends import NUMBA_IS_MISSING
from recurra.kernels.flops import flop_formula, hand_over_formulas
from recurra.kernels.operators import (
    are_batched,
    differentiable_gradients,
    register_derivatives,
    transforms_are_active,
    with_known_signature,
)
from recurra.kernels.tensors import require_one_device, usable_threads
from recurra.selectivescan.plain import at_once

_INPUTS = "Tensor x, Tensor step, Tensor a, Tensor b, Tensor c, Tensor h0"
_library = torch.library.Library("recurra", "FRAGMENT")
_library.define(f"selective_scan({_INPUTS}, bool keep) -> (Tensor, Tensor, Tensor)")
_library.define(f"selective_scan_backward(Tensor dy, Tensor dlast, {_INPUTS}, Tensor kept) -> Tensor[]")


def kernels_take(*tensors: Tensor) -> bool:
    """Return whether the kernels can run: eagerly, in float32 on the CPU, for two or more steps of the first tensor."""
    if NUMBA_IS_MISSING or torch.compiler.is_compiling() or transforms_are_active():
        return False
    return tensors[0].shape[1] > 1 and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)


def by_kernels(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (y, last h), with derivatives of any order.

    Raises:
        ValueError: from the operators, if a tensor does not fit.
    """
    hand_over_formulas()
    inputs = (x, step, a, b, c, h0)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    y, last, _ = _SelectiveScan.apply(*inputs, keep)
    return y, last


def _check(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, h0: Tensor) -> None:
    if x.dim() != 3 or x.dtype != torch.float32:
        raise ValueError(sentence("x", kind_of(x), "float32 (B, L, D)"))
    batch, length, row = x.shape
    n_modes = a.shape[-1] if a.dim() else 0
    require_layout("step", step, x.shape, x.dtype, x.device)
    require_layout("a", a, (row, n_modes), x.dtype, x.device)
    require_layout("b", b, (batch, length, n_modes), x.dtype, x.device)
    require_layout("c", c, (batch, length, n_modes), x.dtype, x.device)
    require_layout("h0", h0, (batch, n_modes, row), x.dtype, x.device)


def _kept_shape(x: Tensor, n_modes: int, keep: bool) -> tuple[int, ...]:
    from recurra.selectivescan.numba_kernels import STEPS

    return (x.shape[0], -(-x.shape[1] // STEPS), n_modes, x.shape[2]) if keep else (0,)


def _work(x: Tensor, n_modes: int) -> tuple[tuple[int, ...], Tensor, dict[str, int]]:
    """The kernels' sizes, their scratch memory, and how to launch them."""
    from recurra.selectivescan.numba_kernels import TILE, scratch_floats

    batch, length, row = x.shape
    workers, size = min(usable_threads(), batch * -(-row // TILE)), scratch_floats(n_modes)
    work = {"jobs": workers, "work": x.numel() * n_modes}
    return (batch, length, row, n_modes, size, workers), x.new_empty(workers * size), work


def _forward(
    x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, h0: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, step, a, b, c, h0)
    n_modes = a.shape[1]
    # not torch.empty, whose type and device a caller may have changed for all of torch
    y, last, kept = x.new_empty(x.shape), x.new_empty(h0.shape).copy_(h0), x.new_empty(_kept_shape(x, n_modes, keep))
    if 0 in (x.numel(), n_modes):
        return y.zero_(), last, kept
    from recurra.selectivescan.numba_kernels import selective_kernels

    inputs = [tensor.resolve_neg().contiguous() for tensor in (x, step, a.t(), b, c)]
    sizes, scratch, work = _work(x, n_modes)
    outputs = last.data_ptr(), y.data_ptr(), kept.data_ptr() if keep else 0
    selective_kernels().forward(*(t.data_ptr() for t in inputs), *outputs, scratch.data_ptr(), *sizes, **work)
    return y, last, kept


def _backward(
    dy: Tensor, dlast: Tensor, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, h0: Tensor, kept: Tensor
) -> list[Tensor]:
    """Return the gradients of x, step, a, b, c and h0."""
    _check(x, step, a, b, c, h0)
    n_modes = a.shape[1]
    require_layout("dy", dy, x.shape, x.dtype, x.device)
    require_layout("dlast", dlast, h0.shape, x.dtype, x.device)
    require_layout("kept", kept, _kept_shape(x, n_modes, True), x.dtype, x.device)
    if 0 in (x.numel(), n_modes):
        return [*(x.new_zeros(tensor.shape) for tensor in (x, step, a, b, c)), dlast.clone()]
    from recurra.selectivescan.numba_kernels import TILE, selective_kernels

    sizes, scratch, work = _work(x, n_modes)
    inputs = [tensor.resolve_neg().contiguous() for tensor in (dy, x, step, a.t(), b, c, kept)]
    dh0, dx, dstep, da = (
        dlast.clone(memory_format=torch.contiguous_format),
        *map(x.new_empty, (x.shape, x.shape, h0.shape)),
    )
    db, dc = (x.new_empty(-(-x.shape[2] // TILE), *b.shape) for _ in range(2))
    places = [tensor.data_ptr() for tensor in (*inputs, dh0, dx, dstep, da, db, dc, scratch)]
    selective_kernels().backward(*places, *sizes, **work)
    return [dx, dstep, da.sum(0).t(), db.sum(0), dc.sum(0), dh0]


_library.impl("selective_scan", _forward, "CPU")
_library.impl("selective_scan_backward", _backward, "CPU")


@torch.library.register_fake("recurra::selective_scan")
def _fake(x, step, a, b, c, h0, keep):  # type: ignore[no-untyped-def]
    require_one_device(x=x, step=step, a=a, b=b, c=c, h0=h0)
    return x.new_empty(x.shape), x.new_empty(h0.shape), x.new_empty(_kept_shape(x, a.shape[1], keep))


@torch.library.register_fake("recurra::selective_scan_backward")
def _backward_fake(dy, dlast, x, step, a, b, c, h0, kept):  # type: ignore[no-untyped-def]
    require_one_device(x=x, step=step, a=a, b=b, c=c, h0=h0, kept=kept, dy=dy, dlast=dlast)
    da = x.new_empty(a.shape[::-1]).t()
    return [x.new_empty(x.shape), x.new_empty(x.shape), da, *(x.new_empty(t.shape) for t in (b, c, h0))]


@flop_formula(torch.ops.recurra.selective_scan)
def _flops(x_shape: Any, step_shape: Any, a_shape: Any, *_: Any, **__: Any) -> int:
    return 4 * torch.Size(x_shape).numel() * a_shape[1]  # the recurrence and the sum over modes


@flop_formula(torch.ops.recurra.selective_scan_backward)
def _backward_flops(
    dy_shape: Any, dlast_shape: Any, x_shape: Any, step_shape: Any, a_shape: Any, *_: Any, **__: Any
) -> int:
    return 14 * torch.Size(x_shape).numel() * a_shape[1]  # the states again, and seven products with their sums


@with_known_signature
class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(x, step, a, b, c, h0, keep):  # type: ignore[no-untyped-def]
        return torch.ops.recurra.selective_scan(x, step, a, b, c, h0, keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:6], output[2])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, dy, dlast, _):  # type: ignore[no-untyped-def]
        *inputs, kept = ctx.saved_tensors
        # gradients that will be differentiated again, or a batch of them
        if torch.is_grad_enabled() or are_batched(dy, dlast):
            return *differentiable_gradients(at_once, inputs, (dy, dlast)), None
        return *torch.ops.recurra.selective_scan_backward(dy, dlast, *inputs, kept), None


register_derivatives(_library, "selective_scan")
register_derivatives(_library, "selective_scan_backward")
