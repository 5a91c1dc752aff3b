"""GateLoop in chunks by Triton's kernels, as a torch operator, and the inputs that they take."""

import math

import torch
from torch import Tensor

from recurra.checks import kind_of, require, require_layout, sentence
from recurra.gateloop.chunk import chunk
from recurra.kernels.operator import Differentiable, Operator
from recurra.kernels.tensors import with_neighbouring_channels

_LARGEST_REAL, _LARGEST_COMPLEX = 128, 64
"""The most channels per head that fit into a program's registers."""
_TRANSITIONS = (torch.float32, torch.complex64, torch.float64, torch.complex128)
"""Types of transitions and states. The last two are for tests in Triton's interpreter: `gate_loop` uses plain torch."""
_INPUTS = (torch.float16, torch.bfloat16, *_TRANSITIONS)
_BLOCK = 16  # steps among which the formulas below count scores


def why_not_kernels(d_qk: int, d_v: int, compute: torch.dtype) -> str:
    """Say why the kernels do not take heads of these sizes, computed in this type; "" if they do."""
    number = str(compute).removeprefix("torch.")
    if compute in (torch.float64, torch.complex128):
        return f"Triton's kernels compute chunks in float32 and complex64, not in {number}"
    largest = _LARGEST_COMPLEX if compute.is_complex else _LARGEST_REAL
    if max(d_qk, d_v) > largest:
        return f"Triton's kernels compute chunks of heads of up to {largest} channels in {number}, not {max(d_qk, d_v)}"
    return ""


def chunk_by_kernels(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (y, h_L) like `chunk.chunk`, by the kernels.

    q, k and v have one type: float16, bfloat16, or that of a and the state, float32 or complex64. Real ones can go with
    a complex a. y has the type of q if everything is real, else that of a. Under torch.func and forward derivatives,
    for which the kernels have no rule, it is `chunk.chunk`.

    Raises:
        ValueError: from the kernels, if a tensor does not fit.
    """
    if q.is_complex() or k.is_complex() or v.is_complex():
        kind = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.promote_types(v.dtype, a.dtype))
        q, k, v, a, state = (x.to(kind) for x in (q, k, v, a, state))
    y, last = _chunk(q, k, v, a, state)
    return y, last


def _y_dtype(q: Tensor, a: Tensor) -> torch.dtype:
    return a.dtype if a.is_complex() else q.dtype


def _check(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> None:
    """Refuse what the kernels cannot take; `chunk_by_kernels` says what they can."""
    dtype, device, number = q.dtype, q.device, a.dtype
    if q.dim() != 4 or dtype not in _INPUTS or (dtype.is_complex and dtype != number):
        raise ValueError(sentence("q", kind_of(q), "(B, L, H, d_qk) of float16, bfloat16 or a's type"))
    if number not in _TRANSITIONS or a.dim() != 4 or (a.shape[-1] != 1 and a.shape[-1] != q.shape[-1]):
        expected = f"float32, float64, complex64 or complex128 (B, L, H, 1 or {q.shape[-1]})"
        raise ValueError(sentence("a", kind_of(a), expected))
    steps, (d_qk, d_v) = q.shape[:3], (q.shape[-1], v.shape[-1] if v.dim() else 0)
    require_layout("k", k, q.shape, dtype, device)
    require_layout("v", v, (*steps, d_v), dtype, device)
    require_layout("a", a, (*steps, a.shape[-1]), number, device)
    require_layout("state", state, (steps[0], steps[2], d_qk, d_v), number, device)
    largest = _LARGEST_COMPLEX if number.is_complex else _LARGEST_REAL
    require(max(d_qk, d_v) <= largest, "d_qk" if d_qk > largest else "d_v", max(d_qk, d_v), f"at most {largest}")


def _allocate(q, k, v, a, state):  # type: ignore[no-untyped-def]
    return v.new_empty(v.shape, dtype=_y_dtype(q, a)), state.new_empty(state.shape)


def _run(results, q, k, v, a, state):  # type: ignore[no-untyped-def]
    y, last = results
    if 0 in (q.numel(), v.numel()):
        y.zero_(), last.copy_(state)
        return
    from recurra.gateloop import triton_chunk

    triton_chunk.forward_into(y, last, *(with_neighbouring_channels(x) for x in (q, k, v, a, state)))


def _check_back(dy, dlast, q, k, v, a, state):  # type: ignore[no-untyped-def]
    _check(q, k, v, a, state)
    if dy is not None:
        require_layout("dy", dy, v.shape, _y_dtype(q, a), q.device)
    if dlast is not None:
        require_layout("dlast", dlast, state.shape, state.dtype, q.device)


def _run_back(results, dy, dlast, q, k, v, a, state):  # type: ignore[no-untyped-def]
    dq, dk, dv, da, dstate = results
    dy = v.new_zeros((1, 1, 1, 1), dtype=_y_dtype(q, a)).expand(v.shape) if dy is None else dy
    dlast = torch.zeros_like(dstate) if dlast is None else dlast
    if 0 in (q.numel(), v.numel()):
        dq.zero_(), dk.zero_(), dv.zero_(), da.zero_(), dstate.copy_(dlast)
        return
    from recurra.gateloop import triton_chunk_backward

    inputs = (with_neighbouring_channels(x) for x in (dy, dlast, q, k, v, a, state))
    triton_chunk_backward.backward_into(results, *inputs)


def _flops(q, k, v, *_):  # type: ignore[no-untyped-def]
    # scores and weighted sums in blocks, and the state read and added to; for real numbers, as in the scan
    return 2 * math.prod(q[:-1]) * (_BLOCK * (q[-1] + v[-1]) + 2 * q[-1] * v[-1])


_operator = Operator(
    "gate_loop_chunk(Tensor q, Tensor k, Tensor v, Tensor a, Tensor state) -> (Tensor, Tensor)",
    check=_check,
    allocate=_allocate,
    run=_run,
    flops=_flops,
    devices=("CPU", "CUDA"),
)
_back = Operator(
    "gate_loop_chunk_backward(Tensor? dy, Tensor? dlast, Tensor q, Tensor k, Tensor v, Tensor a, Tensor state) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_back,
    allocate=lambda dy, dlast, *inputs: tuple(x.new_empty(x.shape) for x in inputs),
    run=_run_back,
    flops=lambda dy, dlast, *inputs: 2 * _flops(*inputs),
    devices=("CPU", "CUDA"),
)


def _reference(q, k, v, a, state):  # type: ignore[no-untyped-def]
    with torch.autocast(a.device.type, enabled=False):  # it would round the matrix products to bfloat16
        y, last = chunk(q, k, v, a, state, "auto")
    return y.to(_y_dtype(q, a)), last


_chunk = Differentiable(
    lambda keep, *inputs: (_operator(*inputs), inputs),
    lambda gradients, saved, needs: _back(*gradients, *saved),
    n_inputs=5,
    reference=_reference,
)
_operator.record = _chunk
