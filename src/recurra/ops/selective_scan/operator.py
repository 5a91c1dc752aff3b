"""The selective scan: the public function, and its two kernels as torch operators with derivatives.

Neither pass stores the states of all steps. The forward pass stores every sixteenth, which takes as much memory as x
with 16 modes, and the backward pass recomputes the others.
"""

import math
from functools import cache
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.checks import kind_of, sentence
from recurra.ops._operator import (
    HALF,
    Operator,
    addresses,
    keeping,
    require_layouts,
    transforms_are_active,
    usable_threads,
)
from recurra.ops._toolkit.backends import choose_backend
from recurra.ops._toolkit.memory import empty_result, in_huge_pages
from recurra.ops.selective_scan.reference import at_once, in_pieces

_INPUTS = "Tensor x, Tensor step, Tensor a, Tensor b, Tensor c, Tensor h0"
_MOST_MODES = 256  # of Triton's kernels, whose programs then have 16 warps


def _is_for_triton(x: Tensor, backend: str) -> bool:
    return x.is_cuda or backend == "triton"


@cache
def _module(name: str) -> Any:
    """The module of the kernels, which loads Numba or Triton; importing it at every call takes as long as a kernel."""
    return import_module(f"recurra.ops.selective_scan.{name}")


def _kernels(x: Tensor, backend: str) -> Any:
    return _module("_triton" if _is_for_triton(x, backend) else "_cpu")


def _check(x, step, a, b, c, h0, keep=False, backend="auto"):  # type: ignore[no-untyped-def]
    on_card = _is_for_triton(x, backend)
    number = torch.float64 if on_card and h0.dtype == torch.float64 else torch.float32
    if x.dim() != 3 or not (x.dtype == number or (on_card and x.dtype == torch.bfloat16)):
        expected = f"{str(number).removeprefix('torch.')}{' or bfloat16' if on_card else ''} (B, L, D)"
        raise ValueError(sentence("x", kind_of(x), expected))
    batch, length, row = x.shape
    n_modes = a.shape[-1] if a.dim() else 0
    weights = (batch, length, n_modes)
    require_layouts(x.dtype, x.device, step=(step, x.shape), b=(b, weights), c=(c, weights))
    require_layouts(number, x.device, a=(a, (row, n_modes)), h0=(h0, (batch, n_modes, row)))


def _kept_shape(x, n_modes, keep, backend):  # type: ignore[no-untyped-def]
    every = _kernels(x, backend).STEPS
    # chunks and modes in one: a trace for any length would ask whether there is one chunk
    return (x.shape[0], (x.shape[1] + every - 1) // every * n_modes, x.shape[2]) if keep else (0,)


def _work(x: Tensor, n_modes: int) -> tuple[tuple[int, ...], Tensor, dict[str, int]]:
    """The kernels' sizes, their scratch memory, and how to launch them."""
    (batch, length, row), kernels = x.shape, _module("_cpu")
    workers, size = min(usable_threads(), batch * -(-row // kernels.TILE)), kernels.scratch_floats(n_modes)
    work = {"jobs": workers, "work": x.numel() * n_modes}
    return (batch, length, row, n_modes, size, workers), x.new_empty(workers * size), work


def _allocate(x, step, a, b, c, h0, keep, backend="auto"):  # type: ignore[no-untyped-def]
    # not torch.empty, whose type and device a caller may have changed for all of torch
    kept = in_huge_pages(h0.new_empty(_kept_shape(x, a.shape[1], keep, backend)))
    return empty_result(x), h0.new_empty(h0.shape), kept


def _run(results, x, step, a, b, c, h0, keep, backend="auto"):  # type: ignore[no-untyped-def]
    y, last, kept = results
    last.copy_(h0)
    if 0 in (x.numel(), a.shape[1]):
        y.zero_()
        return
    inputs, kernels = [tensor.resolve_neg().contiguous() for tensor in (x, step, a.t(), b, c)], _kernels(x, backend)
    if _is_for_triton(x, backend):
        kernels.forward_into(y, last, kept if keep else None, *inputs)
        return
    sizes, scratch, work = _work(x, a.shape[1])
    kept_address = kept.data_ptr() if keep else 0
    kernels.selective_forward(*addresses(*inputs, last, y), kept_address, scratch.data_ptr(), *sizes, **work)


def _check_back(dy, dlast, x, step, a, b, c, h0, kept, backend="auto"):  # type: ignore[no-untyped-def]
    _check(x, step, a, b, c, h0, True, backend)
    require_layouts(x.dtype, x.device, dy=(dy, x.shape))
    kept_shape = _kept_shape(x, a.shape[1], True, backend)
    require_layouts(h0.dtype, x.device, dlast=(dlast, h0.shape), kept=(kept, kept_shape))


def _allocate_back(dy, dlast, x, step, a, b, c, h0, kept, backend="auto"):  # type: ignore[no-untyped-def]
    da = a.new_empty(a.shape[::-1]).t()
    return [empty_result(x), empty_result(x), da, *(t.new_empty(t.shape) for t in (b, c, h0))]


def _run_back(results, dy, dlast, x, step, a, b, c, h0, kept, backend="auto"):  # type: ignore[no-untyped-def]
    dx, dstep, da, db, dc, dh0 = results
    dh0.zero_() if dlast is None else dh0.copy_(dlast)
    if 0 in (x.numel(), a.shape[1]):
        for gradient in results[:5]:
            gradient.zero_()
        return
    dy, kernels = torch.zeros_like(x) if dy is None else dy, _kernels(x, backend)
    tiles = -(-x.shape[2] // kernels.TILE)
    inputs = [tensor.resolve_neg().contiguous() for tensor in (dy, x, step, a.t(), b, c, kept)]
    parts = h0.new_empty(h0.shape), *(h0.new_empty(tiles, *b.shape) for _ in "bc")
    if _is_for_triton(x, backend):
        kernels.backward_into(dh0, dx, dstep, *parts, *inputs)
    else:
        sizes, scratch, work = _work(x, a.shape[1])
        kernels.selective_backward(*addresses(*inputs, dh0, dx, dstep, *parts, scratch), *sizes, **work)
    for part, gradient in zip(parts, (da.t(), db, dc)):
        if part.dtype == gradient.dtype:
            torch.sum(part, 0, out=gradient)
        else:  # rounded once
            gradient.copy_(part.sum(0))


_operator = Operator(
    f'selective_scan({_INPUTS}, bool keep, str backend="auto") -> (Tensor, Tensor, Tensor)',
    check=_check,
    allocate=_allocate,
    run=_run,
    flops=lambda x, step, a, *_: 4 * math.prod(x) * a[1],  # the recurrence and the sum over modes
    devices=("CPU", "CUDA"),
)
_back = Operator(
    f'selective_scan_backward(Tensor? dy, Tensor? dlast, {_INPUTS}, Tensor kept, str backend="auto") -> Tensor[]',
    check=_check_back,
    allocate=_allocate_back,
    run=_run_back,
    # the states again, and seven products with their sums
    flops=lambda dy, dlast, x, step, a, *_: 14 * math.prod(x) * a[1],
    devices=("CPU", "CUDA"),
)


def _reference(x, step, a, b, c, h0, backend):  # type: ignore[no-untyped-def]
    y, last = at_once(*(tensor.to(h0.dtype) for tensor in (x, step, a, b, c, h0)))
    return y.to(x.dtype), last


_selective_scan = keeping(_operator, _back, 6, 2, reference=_reference)


def _why_not_kernels(backend: str, *inputs: Tensor) -> str:
    """Say why the kernels of a backend do not take these inputs; "" if they do."""
    x, step, a, b, c, h0 = inputs
    if backend == "numba":
        fits = all(tensor.dtype == torch.float32 and tensor.is_cpu for tensor in inputs)
        return "" if fits else "Numba's kernels take float32 on the CPU"
    one_type = x.dtype == step.dtype == b.dtype == c.dtype and x.dtype in (torch.bfloat16, h0.dtype)
    if not one_type or a.dtype != h0.dtype or h0.dtype not in (torch.float32, torch.float64):
        return "Triton's kernels take a and h0 in float32 or float64, and the others in that type or bfloat16"
    if a.shape[1] > _MOST_MODES:
        return f"Triton's kernels take up to {_MOST_MODES} modes a channel, not {a.shape[1]}"
    return ""


def selective_scan(
    x: Float[Tensor, "B L D"],
    step: Float[Tensor, "B L D"],
    a: Float[Tensor, "D N"],
    b: Float[Tensor, "B L N"],
    c: Float[Tensor, "B L N"],
    h0: Float[Tensor, "B N D"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B N D"]]:
    """Compute h_t = exp(step_t a) h_{t-1} + step_t x_t b_t and y_t = c_t h_t for every channel's own modes.

    Gu and Dao, arXiv 2312.00752, section 3.2.

    A step of 0 leaves the state unchanged. On the CPU in float32, and on CUDA, one kernel runs each pass; otherwise
    long sequences run in pieces of time. Either way, the backward pass recomputes the states between stored ones (as
    the published kernel does, Gu & Dao, section 3.3.2). Traces and torch.func process all steps at once.

    Args:
        x: the input. x, step, b and c have one type: that of a and h0, float32 or float64, or float16 or bfloat16,
            which are computed in a's type. Triton's kernels read and write bfloat16.
        step: the step sizes, Delta.
        a: eigenvalues, below 0 for modes that decay.
        b, c: input and output weights of the modes, the same for all channels.
        h0: the state before the first step.
        backend: as for `recurra.linear_scan`.

    Returns:
        y, of x's type, and the last state.

    Raises:
        ValueError: the backend does not exist or does not support the inputs.
        RuntimeError: the backend cannot run here.
    """
    inputs, chosen = (x, step, a, b, c, h0), choose_backend(backend, x.device)
    for name, tensor in zip(("step", "a", "b", "c", "h0"), inputs[1:]):
        if tensor.device != x.device:
            raise ValueError(sentence(name, kind_of(tensor), f"a tensor on {x.device}, as x"))
    if chosen != "reference":
        obstacle, by_name = _why_not_kernels(chosen, *inputs), backend != "auto"
        if obstacle and by_name:
            raise ValueError(sentence("backend", repr(backend), "'auto' or 'reference'", obstacle))
        if not obstacle and (by_name or not (torch.compiler.is_compiling() or transforms_are_active())):
            _check(*inputs, backend=chosen)
            return _selective_scan(*inputs, chosen)[:2]  # type: ignore[return-value]
    if x.dtype not in HALF:
        return in_pieces(*inputs)
    y, last = in_pieces(*(tensor.to(h0.dtype) for tensor in inputs))
    return y.to(x.dtype), last
