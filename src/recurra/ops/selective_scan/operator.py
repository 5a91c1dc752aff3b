"""The selective scan: its front door, and its two kernels as torch operators with derivatives.

Neither pass keeps the states of all steps: the forward
pass keeps every sixteenth, which takes as much memory as x with 16 modes, and the backward pass computes the others
again.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.checks import kind_of, require_layout, sentence
from recurra.ops._operator import Differentiable, Operator, addresses, transforms_are_active, usable_threads
from recurra.ops._toolkit.backends import NUMBA_IS_MISSING
from recurra.ops.selective_scan.reference import at_once, in_pieces

_INPUTS = "Tensor x, Tensor step, Tensor a, Tensor b, Tensor c, Tensor h0"


def _check(x, step, a, b, c, h0, keep=False):  # type: ignore[no-untyped-def]
    if x.dim() != 3 or x.dtype != torch.float32:
        raise ValueError(sentence("x", kind_of(x), "float32 (B, L, D)"))
    batch, length, row = x.shape
    n_modes = a.shape[-1] if a.dim() else 0
    require_layout("step", step, x.shape, x.dtype, x.device)
    require_layout("a", a, (row, n_modes), x.dtype, x.device)
    require_layout("b", b, (batch, length, n_modes), x.dtype, x.device)
    require_layout("c", c, (batch, length, n_modes), x.dtype, x.device)
    require_layout("h0", h0, (batch, n_modes, row), x.dtype, x.device)


def _kept_shape(x, n_modes, keep):  # type: ignore[no-untyped-def]
    from recurra.ops.selective_scan._cpu import STEPS

    # chunks and modes in one: a trace for any length would ask whether there is one chunk
    return (x.shape[0], (x.shape[1] + STEPS - 1) // STEPS * n_modes, x.shape[2]) if keep else (0,)


def _work(x: Tensor, n_modes: int) -> tuple[tuple[int, ...], Tensor, dict[str, int]]:
    """The kernels' sizes, their scratch memory, and how to launch them."""
    from recurra.ops.selective_scan._cpu import TILE, scratch_floats

    batch, length, row = x.shape
    workers, size = min(usable_threads(), batch * -(-row // TILE)), scratch_floats(n_modes)
    work = {"jobs": workers, "work": x.numel() * n_modes}
    return (batch, length, row, n_modes, size, workers), x.new_empty(workers * size), work


def _allocate(x, step, a, b, c, h0, keep):  # type: ignore[no-untyped-def]
    # not torch.empty, whose type and device a caller may have changed for all of torch
    return x.new_empty(x.shape), x.new_empty(h0.shape), x.new_empty(_kept_shape(x, a.shape[1], keep))


def _run(results, x, step, a, b, c, h0, keep):  # type: ignore[no-untyped-def]
    y, last, kept = results
    last.copy_(h0)
    if 0 in (x.numel(), a.shape[1]):
        y.zero_()
        return
    from recurra.ops.selective_scan._cpu import selective_forward

    inputs = [tensor.resolve_neg().contiguous() for tensor in (x, step, a.t(), b, c)]
    sizes, scratch, work = _work(x, a.shape[1])
    kept_address = kept.data_ptr() if keep else 0
    selective_forward(*addresses(*inputs, last, y), kept_address, scratch.data_ptr(), *sizes, **work)


def _check_back(dy, dlast, x, step, a, b, c, h0, kept):  # type: ignore[no-untyped-def]
    _check(x, step, a, b, c, h0)
    require_layout("dy", dy, x.shape, x.dtype, x.device)
    require_layout("dlast", dlast, h0.shape, x.dtype, x.device)
    require_layout("kept", kept, _kept_shape(x, a.shape[1], True), x.dtype, x.device)


def _allocate_back(dy, dlast, x, step, a, b, c, h0, kept):  # type: ignore[no-untyped-def]
    da = x.new_empty(a.shape[::-1]).t()
    return [x.new_empty(x.shape), x.new_empty(x.shape), da, *(x.new_empty(t.shape) for t in (b, c, h0))]


def _run_back(results, dy, dlast, x, step, a, b, c, h0, kept):  # type: ignore[no-untyped-def]
    dx, dstep, da, db, dc, dh0 = results
    dh0.copy_(dlast)
    if 0 in (x.numel(), a.shape[1]):
        for gradient in results[:5]:
            gradient.zero_()
        return
    from recurra.ops.selective_scan._cpu import TILE, selective_backward

    sizes, scratch, work = _work(x, a.shape[1])
    inputs = [tensor.resolve_neg().contiguous() for tensor in (dy, x, step, a.t(), b, c, kept)]
    parts_a, parts_b, parts_c = x.new_empty(h0.shape), *(x.new_empty(-(-x.shape[2] // TILE), *b.shape) for _ in "bc")
    selective_backward(*addresses(*inputs, dh0, dx, dstep, parts_a, parts_b, parts_c, scratch), *sizes, **work)
    for parts, gradient in ((parts_a, da.t()), (parts_b, db), (parts_c, dc)):
        torch.sum(parts, 0, out=gradient)


_operator = Operator(
    f"selective_scan({_INPUTS}, bool keep) -> (Tensor, Tensor, Tensor)",
    check=_check,
    allocate=_allocate,
    run=_run,
    flops=lambda x, step, a, *_: 4 * math.prod(x) * a[1],  # the recurrence and the sum over modes
)
_back = Operator(
    f"selective_scan_backward(Tensor dy, Tensor dlast, {_INPUTS}, Tensor kept) -> Tensor[]",
    check=_check_back,
    allocate=_allocate_back,
    run=_run_back,
    # the states again, and seven products with their sums
    flops=lambda dy, dlast, x, step, a, *_: 14 * math.prod(x) * a[1],
)


def _forward(keep, *inputs):  # type: ignore[no-untyped-def]
    results = _operator(*inputs, keep)
    return results, (*inputs, results[2])


def _backward(gradients, saved, needs):  # type: ignore[no-untyped-def]
    like = saved[0], saved[5]  # y has the shape of x, the last state that of h0
    return _back(*(torch.zeros_like(x) if g is None else g for g, x in zip(gradients, like)), *saved)


_selective_scan = Differentiable(_forward, _backward, n_inputs=6, reference=at_once, constant=(2,))


def selective_scan(
    x: Float[Tensor, "B L D"],
    step: Float[Tensor, "B L D"],
    a: Float[Tensor, "D N"],
    b: Float[Tensor, "B L N"],
    c: Float[Tensor, "B L N"],
    h0: Float[Tensor, "B N D"],
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B N D"]]:
    """Compute h_t = exp(step_t a) h_{t-1} + step_t x_t b_t and y_t = c_t h_t for every channel's own modes.

    Gu and Dao, arXiv 2312.00752, section 3.2.

    A step of 0 lets the state pass. On the CPU in float32 one kernel runs each pass; otherwise long sequences run in
    pieces of time. Either way the backward pass computes the states between kept ones again (as the published kernel
    does, Gu & Dao, section 3.3.2). Traces, and torch.func, take all steps at once.

    Args:
        x: the input, float32 or float64 like all others.
        step: the step sizes, Delta.
        a: eigenvalues, below 0 for modes that decay.
        b, c: how the modes read and are read, the same for all channels.
        h0: the state before the first step.

    Returns:
        y and the last state.
    """
    fits = all(x.dtype == torch.float32 and x.is_cpu for x in (x, step, a, b, c, h0)) and not NUMBA_IS_MISSING
    if fits and x.shape[1] > 1 and not torch.compiler.is_compiling() and not transforms_are_active():
        return _selective_scan(x, step, a, b, c, h0)[:2]  # type: ignore[return-value]
    return in_pieces(x, step, a, b, c, h0)
