"""GateLoop with heads by Numba's kernels, as a torch operator, and the inputs that they take."""

from typing import Any

import torch
from torch import Tensor

from recurra.checks import kind_of, require_layout, sentence
from recurra.gateloop.chunk import chunk
from recurra.kernels.flops import flop_formula, hand_over_formulas
from recurra.kernels.operators import (
    differentiable_gradients,
    gradients_are_differentiated,
    register_derivatives,
    transforms_are_active,
    with_known_signature,
)
from recurra.kernels.tensors import require_one_device, usable_threads, with_neighbouring_channels

_NUMBERS = {torch.float32: "float32", torch.float64: "float64"}
_WIDTH = 16  # floats in a vector of the kernels
_BLOCKS = (1, 2, 4)
"""Possible numbers of vectors in a block. What a step keeps for each of them has to fit into 32 registers, and kernels
of 3 took twice to four times as long: LLVM knows no such vectors."""
_EVERY, _LARGE_STATE = 32, 8192
"""Steps between two states that the forward pass keeps, twice as many if a state has more than this many floats: the
kept states then take less memory than v does twice, and those between them, in the backward pass, fit the cache."""

_library = torch.library.Library("recurra", "FRAGMENT")
_library.define(
    "gate_loop_heads(Tensor q, Tensor k, Tensor v, Tensor a, Tensor state, bool keep=False) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "gate_loop_heads_backward(Tensor? dy, Tensor? dlast, Tensor q, Tensor k, Tensor v, Tensor a, Tensor kept, "
    "bool with_gates=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def chunk_by_heads(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (y, h_L) like `chunk.chunk`, by the kernels, from at least one step and tensors with numbers in them.

    Real q, k and v can go with a complex a; the type of a and the state counts. Under torch.func and forward
    derivatives, for which the kernels have no rule, it is `chunk.chunk`.

    Raises:
        ValueError: from the operator, if a tensor does not fit.
    """
    if transforms_are_active():
        return chunk(q, k, v, a, state, "auto")
    hand_over_formulas()
    inputs = (q.to(a.dtype), k.to(a.dtype), v.to(a.dtype), a, state)
    records = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    y, last, _ = _Heads.apply(*inputs, records)
    return y, last


def _check(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> None:
    """Refuse what the kernels cannot take; `chunk_by_heads` says what they can."""
    if q.dim() != 4 or q.dtype.to_real() not in _NUMBERS:
        raise ValueError(sentence("q", kind_of(q), "float32, float64, complex64 or complex128 (B, L, H, d_qk)"))
    steps, like = q.shape[:3], (q.dtype, q.device)
    require_layout("k", k, q.shape, *like)
    require_layout("v", v, (*steps, v.shape[-1] if v.dim() else 0), *like)
    if a.dim() != 4 or a.shape[-1] != q.shape[-1]:
        require_layout("a", a, (*steps, 1), *like)
    require_layout("a", a, (*steps, a.shape[-1]), *like)


def _state_shape(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    return q.shape[0], q.shape[2], q.shape[3], v.shape[3]


def _every(q: Tensor, v: Tensor) -> int:
    return _EVERY if q.shape[-1] * v.shape[-1] * _floats(q) <= _LARGE_STATE else 2 * _EVERY


def _kept_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """The states that enter the first and every `_every`th step after it: (B, H, chunks, d_qk, d_v)."""
    batch, heads, d_qk, d_v = _state_shape(q, v)
    return batch, heads, (q.shape[1] + _every(q, v) - 1) // _every(q, v), d_qk, d_v


def _floats(x: Tensor) -> int:
    return 2 if x.is_complex() else 1


def _vectors(floats: int) -> int:
    """The vectors in a block. A block takes the time of its vectors and half a one more, filled or not (measured)."""
    vectors = -(-floats // _WIDTH)
    return min(_BLOCKS, key=lambda size: (-(-vectors // size) * (2 * size + 1), size))


def _describe(x: Tensor) -> tuple[int, int, int, int]:
    """Describe a (B, L, H, d) tensor to a kernel: (address, batch stride, time stride, head stride), in floats."""
    batch, time, head = (stride * _floats(x) for stride in x.stride()[:3])
    return x.data_ptr(), batch, time, head


def _sizes(q: Tensor, v: Tensor, a: Tensor) -> tuple[int, ...]:
    batch, length, heads, d_qk = q.shape
    workers = min(usable_threads(), batch * heads)
    return batch, length, heads, d_qk, v.shape[3], int(a.shape[3] > 1), _every(q, v), workers


def _new(like: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _scratch(like: Tensor, floats: int) -> Tensor:
    return torch.empty(floats, dtype=like.dtype.to_real(), device=like.device)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, a)
    require_layout("state", state, _state_shape(q, v), q.dtype, q.device)
    y, last = _new(v, v.shape), _new(state, state.shape)
    kept = _new(state, _kept_shape(q, v) if keep else (0,))
    if 0 in (q.numel(), v.numel()):
        return y.zero_(), last.copy_(state), kept
    from recurra.gateloop.heads_kernels import forward_kernel

    q, k, v, a = (with_neighbouring_channels(x) for x in (q, k, v, a))
    state = state.resolve_conj().resolve_neg().contiguous()
    sizes, vectors = _sizes(q, v, a), _vectors(v.shape[3] * _floats(v))
    scratch = _scratch(q, sizes[-1] * q.shape[3] * vectors * _WIDTH)
    forward_kernel(_NUMBERS[q.dtype.to_real()], q.is_complex(), vectors)(
        *map(_describe, (q, k, v, a)), state.data_ptr(), _describe(y), last.data_ptr(),
        kept.data_ptr() if keep else 0, scratch.data_ptr(), *sizes,
        jobs=sizes[-1], work=q.shape[1] * state.numel(),
    )  # fmt: skip
    return y, last, kept


def _backward(
    dy: Tensor | None,
    dlast: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    kept: Tensor,
    with_gates: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(q, k, v, a)
    require_layout("kept", kept, _kept_shape(q, v), q.dtype, q.device)
    if dy is not None:
        require_layout("dy", dy, v.shape, q.dtype, q.device)
    if dlast is not None:
        require_layout("dlast", dlast, _state_shape(q, v), q.dtype, q.device)
    dq, dk, dv, da = (_new(x, x.shape) for x in (q, k, v, a if with_gates else a[..., :0]))
    dstate = _new(q, _state_shape(q, v))
    dlast = torch.zeros_like(dstate) if dlast is None else dlast.resolve_conj().resolve_neg().contiguous()
    if 0 in (q.numel(), v.numel()):
        return dq.zero_(), dk.zero_(), dv.zero_(), da.zero_(), dstate.copy_(dlast)
    from recurra.gateloop import heads_kernels

    if dy is None:
        dy = torch.zeros((1, 1, 1, v.shape[3]), dtype=v.dtype, device=v.device).expand(v.shape)
    dy, q, k, v, a = (with_neighbouring_channels(x) for x in (dy, q, k, v, a))
    sizes, vectors = _sizes(q, v, a), _vectors(q.shape[3] * _floats(q))
    choice = heads_kernels.backward_kernel if with_gates else heads_kernels.backward_kernel_without_gates
    tiles = sizes[-2] + 2 if with_gates else 1  # the states of a chunk and the carry, or either in its turn
    scratch = _scratch(q, sizes[-1] * (tiles * v.shape[3] * vectors + v.shape[3] + _WIDTH) * _WIDTH)
    kept = kept.contiguous()
    choice(_NUMBERS[q.dtype.to_real()], q.is_complex(), vectors)(
        *map(_describe, (dy, q, k, v, a)), kept.data_ptr(), dlast.data_ptr(),
        *map(_describe, (dq, dk, dv, da) if with_gates else (dq, dk, dv)), dstate.data_ptr(), scratch.data_ptr(),
        *sizes, jobs=sizes[-1], work=q.shape[1] * dstate.numel(),
    )  # fmt: skip
    return dq, dk, dv, da, dstate


_library.impl("gate_loop_heads", _forward, "CPU")
_library.impl("gate_loop_heads_backward", _backward, "CPU")


@torch.library.register_fake("recurra::gate_loop_heads")
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    require_one_device(q=q, k=k, v=v, a=a, state=state)
    return v.new_empty(v.shape), state.new_empty(state.shape), state.new_empty(_kept_shape(q, v) if keep else (0,))


@torch.library.register_fake("recurra::gate_loop_heads_backward")
def _backward_fake(
    dy: Tensor | None,
    dlast: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    kept: Tensor,
    with_gates: bool = True,
) -> tuple[Tensor, ...]:
    require_one_device(q=q, k=k, v=v, a=a, kept=kept, dy=dy, dlast=dlast)
    gates = a if with_gates else a[..., :0]
    return *(x.new_empty(x.shape) for x in (q, k, v, gates)), q.new_empty(_state_shape(q, v))


def _state_numbers(q_shape: Any, v_shape: Any) -> int:
    return torch.Size(q_shape).numel() * v_shape[-1]


@flop_formula(torch.ops.recurra.gate_loop_heads)
def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any) -> int:
    return 5 * _state_numbers(q_shape, v_shape)  # for real numbers, as in the scan


@flop_formula(torch.ops.recurra.gate_loop_heads_backward)
def _backward_flops(
    dy_shape: Any, dlast_shape: Any, q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any
) -> int:
    return 14 * _state_numbers(q_shape, v_shape)


@with_known_signature
class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, a, state, keep):  # type: ignore[no-untyped-def]
        return torch.ops.recurra.gate_loop_heads(q, k, v, a, state, keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:5], output[2])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, dy: Any, dlast: Any, _: Any) -> tuple:
        *inputs, kept = ctx.saved_tensors
        if gradients_are_differentiated():
            return *differentiable_gradients(_reference_outputs, inputs, (dy, dlast)), None
        with_gates = ctx.needs_input_grad[3]
        dq, dk, dv, da, dstate = torch.ops.recurra.gate_loop_heads_backward(dy, dlast, *inputs[:4], kept, with_gates)
        return dq, dk, dv, da if with_gates else None, dstate, None


def _recorded(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor, keep: bool = False) -> tuple[Tensor, ...]:
    y, last, kept = _Heads.apply(q, k, v, a, state, True)  # the gradient needs the kept states
    return y, last, kept if keep else kept.new_empty(0)


register_derivatives(_library, "gate_loop_heads", _recorded)
register_derivatives(_library, "gate_loop_heads_backward")


def _reference_outputs(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return chunk(q, k, v, a, state, "auto")
