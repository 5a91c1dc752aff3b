"""GateLoop in chunks by Triton's kernels, as a torch operator, and the inputs that they take."""

from typing import Any

import torch
from torch import Tensor

from recurra.checks import kind_of, require, require_layout, sentence
from recurra.gateloop.chunk import chunk
from recurra.kernels.flops import flop_formula, hand_over_formulas
from recurra.kernels.operators import (
    differentiable_gradients,
    gradients_are_differentiated,
    register_derivatives,
    transforms_are_active,
    with_known_signature,
)
from recurra.kernels.tensors import require_one_device, with_neighbouring_channels

_LARGEST_REAL, _LARGEST_COMPLEX = 128, 64
"""The most channels per head that fit into a program's registers."""
_TRANSITIONS = (torch.float32, torch.complex64, torch.float64, torch.complex128)
"""Types of transitions and states. The last two are for tests in Triton's interpreter: `gate_loop` uses plain torch."""
_INPUTS = (torch.float16, torch.bfloat16, *_TRANSITIONS)
_BLOCK = 16  # steps among which the formulas below count scores

_library = torch.library.Library("recurra", "FRAGMENT")
_library.define("gate_loop_chunk(Tensor q, Tensor k, Tensor v, Tensor a, Tensor state) -> (Tensor, Tensor)")
_library.define(
    "gate_loop_chunk_backward(Tensor? dy, Tensor? dlast, Tensor q, Tensor k, Tensor v, Tensor a, Tensor state) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)"
)


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
    if transforms_are_active():
        with torch.autocast(a.device.type, enabled=False):  # it would round the matrix products to bfloat16
            return _reference_outputs(q, k, v, a, state)
    hand_over_formulas()
    return _Chunk.apply(q, k, v, a, state)


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


def _forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    _check(q, k, v, a, state)
    y = torch.empty(v.shape, dtype=_y_dtype(q, a), device=v.device)
    last = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    if 0 in (q.numel(), v.numel()):
        return y.zero_(), last.copy_(state)
    from recurra.gateloop import triton_chunk

    q, k, v, a, state = (with_neighbouring_channels(x) for x in (q, k, v, a, state))
    triton_chunk.forward_into(y, last, q, k, v, a, state)
    return y, last


def _backward(
    dy: Tensor | None, dlast: Tensor | None, q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(q, k, v, a, state)
    if dy is not None:
        require_layout("dy", dy, v.shape, _y_dtype(q, a), q.device)
    if dlast is not None:
        require_layout("dlast", dlast, state.shape, state.dtype, q.device)
    dq, dk, dv, da, dstate = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, a, state))
    if dy is None:
        dy = torch.zeros((1, 1, 1, 1), dtype=_y_dtype(q, a), device=v.device).expand(v.shape)
    dlast = torch.zeros_like(dstate) if dlast is None else dlast
    if 0 in (q.numel(), v.numel()):
        return dq.zero_(), dk.zero_(), dv.zero_(), da.zero_(), dstate.copy_(dlast)
    from recurra.gateloop import triton_chunk_backward

    inputs = (with_neighbouring_channels(x) for x in (dy, dlast, q, k, v, a, state))
    triton_chunk_backward.backward_into((dq, dk, dv, da, dstate), *inputs)
    return dq, dk, dv, da, dstate


for _device in ("CPU", "CUDA"):
    _library.impl("gate_loop_chunk", _forward, _device)
    _library.impl("gate_loop_chunk_backward", _backward, _device)


@torch.library.register_fake("recurra::gate_loop_chunk")
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    require_one_device(q=q, k=k, v=v, a=a, state=state)
    return v.new_empty(v.shape, dtype=_y_dtype(q, a)), state.new_empty(state.shape)


@torch.library.register_fake("recurra::gate_loop_chunk_backward")
def _backward_fake(
    dy: Tensor | None, dlast: Tensor | None, q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor
) -> tuple[Tensor, ...]:
    require_one_device(q=q, k=k, v=v, a=a, state=state, dy=dy, dlast=dlast)
    return tuple(x.new_empty(x.shape) for x in (q, k, v, a, state))


def _matrix_products(q_shape: Any, v_shape: Any) -> int:
    # scores and weighted sums in blocks, and the state read and added to; for real numbers, as in the scan
    d_qk, d_v = q_shape[-1], v_shape[-1]
    return 2 * torch.Size(q_shape[:-1]).numel() * (_BLOCK * (d_qk + d_v) + 2 * d_qk * d_v)


@flop_formula(torch.ops.recurra.gate_loop_chunk)
def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any) -> int:
    return _matrix_products(q_shape, v_shape)


@flop_formula(torch.ops.recurra.gate_loop_chunk_backward)
def _backward_flops(
    dy_shape: Any, dlast_shape: Any, q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any
) -> int:
    return 2 * _matrix_products(q_shape, v_shape)


@with_known_signature
class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, a, state):  # type: ignore[no-untyped-def]
        return torch.ops.recurra.gate_loop_chunk(q, k, v, a, state)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Any, dlast: Any) -> tuple:
        if gradients_are_differentiated():
            return differentiable_gradients(_reference_outputs, ctx.saved_tensors, (dy, dlast))
        return torch.ops.recurra.gate_loop_chunk_backward(dy, dlast, *ctx.saved_tensors)


register_derivatives(_library, "gate_loop_chunk", _Chunk.apply)
register_derivatives(_library, "gate_loop_chunk_backward")


def _reference_outputs(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    y, last = chunk(q, k, v, a, state, "auto")
    return y.to(_y_dtype(q, a)), last
