"""GateLoop with heads as torch operators: by Numba's kernels on the CPU, in chunks by Triton's kernels on a GPU."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from recurra.checks import kind_of, require, sentence
from recurra.ops._operator import (
    Differentiable,
    Operator,
    last_dim_contiguous,
    require_layouts,
    usable_threads,
    without_autocast,
)
from recurra.ops._toolkit.memory import empty_result, in_huge_pages
from recurra.ops.gate_loop.reference import chunk

_NUMBERS = {torch.float32: "float32", torch.float64: "float64"}
_WIDTH = 16  # floats in a vector of the kernels
_BLOCKS = (1, 2, 4)
"""Possible numbers of vectors in a block. What a step keeps for each of them has to fit into 32 registers, and kernels
of 3 took twice to four times as long: LLVM knows no such vectors."""
_EVERY, _LARGE_STATE = 32, 8192
"""Steps between two states that the forward pass keeps, twice as many if a state has more than this many floats: the
kept states then take less memory than v does twice, and those between them, in the backward pass, fit the cache."""


def chunk_by_heads(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor, rounded: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute (y, h_L) like `chunk.chunk`, by the kernels, from at least one step and tensors with numbers in them.

    Real q, k and v can go with a complex a; the type of a and the state counts. q and k may have a head for each group
    of v's heads. With `rounded`, products of chunks may round their factors to bfloat16. Under torch.func and forward
    derivatives, for which the kernels have no rule, it is `chunk.chunk`.
    """
    if a.is_complex():
        q, k, v = q.to(a.dtype), k.to(a.dtype), v.to(a.dtype)
    y, last, *_ = _heads(q, k, v, a, state, rounded)
    return y, last


def of_all_heads(x: Tensor, like: Tensor) -> Tensor:
    """Give every head of `like` what its group has."""
    if x.shape[2] == like.shape[2]:
        return x
    each = like.shape[2] // x.shape[2]
    return x[:, :, :, None].expand(-1, -1, -1, each, -1).flatten(2, 3)


def _state_shape(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    return q.shape[0], v.shape[2], q.shape[3], v.shape[3]


def _every(q: Tensor, v: Tensor) -> int:
    return _EVERY if q.shape[-1] * v.shape[-1] * _floats(q) <= _LARGE_STATE else 2 * _EVERY


def _kept_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """The states that enter the first and every `_every`th step after it: (B, H, chunks, d_qk, d_v) in memory.

    One dimension has heads, chunks and d_qk: a trace for any length would ask whether there is one chunk.
    """
    batch, heads, d_qk, d_v = _state_shape(q, v)
    return batch, heads * ((q.shape[1] + _every(q, v) - 1) // _every(q, v)) * d_qk, d_v


def _floats(x: Tensor) -> int:
    return 2 if x.is_complex() else 1


@cache
def _vectors(floats: int) -> int:
    """The vectors in a block. A block takes the time of its vectors and half a one more, filled or not (measured)."""
    vectors = -(-floats // _WIDTH)
    return min(_BLOCKS, key=lambda size: (-(-vectors // size) * (2 * size + 1), size))


def _describe(x: Tensor) -> tuple[int, int, int, int]:
    """Describe a (B, L, H, d) tensor to a kernel: (address, batch stride, time stride, head stride), in floats."""
    batch, time, head, _ = x.stride()
    return (x.data_ptr(), 2 * batch, 2 * time, 2 * head) if x.is_complex() else (x.data_ptr(), batch, time, head)


def _sizes(q: Tensor, v: Tensor, a: Tensor) -> tuple[int, ...]:
    batch, length, heads, d_qk = *v.shape[:3], q.shape[3]
    workers = min(usable_threads(), batch * heads)
    return batch, length, heads, d_qk, v.shape[3], int(a.shape[3] > 1), _every(q, v), workers


def _scratch(like: Tensor, floats: int) -> Tensor:
    return like.new_empty(floats, dtype=like.dtype.to_real())


def _check(q, k, v, a, state=None, keep=False, rounded=False):  # type: ignore[no-untyped-def]
    """Refuse what the kernels cannot take; `chunk_by_heads` says what they can."""
    if q.dim() != 4 or q.dtype.to_real() not in _NUMBERS:
        raise ValueError(sentence("q", kind_of(q), "float32, float64, complex64 or complex128 (B, L, H, d_qk)"))
    like = q.dtype, q.device
    heads = v.shape[2] if v.dim() == 4 and q.shape[2] and v.shape[2] % q.shape[2] == 0 else q.shape[2]
    steps = *q.shape[:2], heads
    per_channel = a.dim() == 4 and a.shape[-1] == q.shape[-1]
    of_a = *steps, a.shape[-1] if per_channel else 1
    require_layouts(*like, k=(k, q.shape), v=(v, (*steps, v.shape[-1] if v.dim() else 0)), a=(a, of_a))
    if state is not None:
        require_layouts(*like, state=(state, _state_shape(q, v)))


def _allocate(q, k, v, a, state, keep, rounded):  # type: ignore[no-untyped-def]
    kept = state.new_empty(*_kept_shape(q, v), dtype=_kept_dtype(q, v, a, rounded)) if keep else state.new_empty(0)
    return empty_result(v), state.new_empty(*state.shape), in_huge_pages(kept)


_SIDE = 32  # channels, to a multiple of which the kernels of chunks pad heads
_LEAST_STATE = {"float32": 8192, "bfloat16": 4096}  # numbers in a state (measured)


def _kept_dtype(q: Tensor, v: Tensor, a: Tensor, rounded: bool) -> torch.dtype:
    """The type of kept states: bfloat16 if the kernels of chunks keep factors, for fewer steps too."""
    is_padded = q.shape[3] % _SIDE or v.shape[3] % _SIDE
    return torch.bfloat16 if _factors(q, v, a, rounded) == "bfloat16" and not is_padded else q.dtype


def _words(q: Tensor, v: Tensor, a: Tensor, rounded: bool) -> str:
    """Return the type of the factors if products of chunks are faster than single steps, "" if not."""
    return _factors(q, v, a, rounded) if q.shape[1] >= _EVERY else ""


def _factors(q: Tensor, v: Tensor, a: Tensor, rounded: bool) -> str:
    """Return the same for any number of steps from a chunk on.

    For each number of a state, steps take 3 operations forward and 8 backward, and chunks 2 and 4, or half as many in
    bfloat16; and more for scores, for padded heads and for copies.
    """
    size = q.shape[3] * v.shape[3]
    if q.dtype != torch.float32 or a.shape[3] > 1 or size < min(_LEAST_STATE.values()):
        return ""
    from recurra.ops._toolkit.vectors import compiles_for

    number = "bfloat16" if rounded and compiles_for("avx512bf16") else "float32"
    return number if size >= _LEAST_STATE[number] else ""


def _run_chunks(kernel, count, number, q, k, v, a, before, after):  # type: ignore[no-untyped-def]
    """Run a kernel of chunks on its arguments before and after q, k, v and a, a job for each group of heads.

    Returns False if some result is not finite, or the groups are fewer than the threads.
    """
    from recurra.ops.gate_loop._chunks_cpu import Sizes

    (batch, length, groups, d_qk), (heads, d_v) = q.shape, v.shape[2:]
    if batch * groups < usable_threads() and groups < heads:
        return False
    workers, every = min(usable_threads(), batch * groups), _every(q, v)
    p, r = (-(-d // _SIDE) * _SIDE for d in (d_qk, d_v))
    share = count(every, p, r, heads // groups)
    scratch, found = _scratch(q, workers * share), _scratch(q, workers)
    kernel(number, every)(
        *before, *map(_describe, (q, k, v, a)), *after, found.data_ptr(), scratch.data_ptr(),
        Sizes(batch, length, groups, heads, d_qk, d_v, p, r, share, workers),
        jobs=workers, work=length * batch * heads * d_qk * d_v,
    )  # fmt: skip
    return found.sum().item() == 0


@cache
def _cpu() -> Any:
    from recurra.ops.gate_loop import _heads_cpu

    return _heads_cpu


def _run(results, q, k, v, a, state, keep, rounded):  # type: ignore[no-untyped-def]
    y, last, kept = results
    if 0 in (q.numel(), v.numel()):
        y.zero_(), last.copy_(state)
        return
    q, k, v, a = (last_dim_contiguous(x) for x in (q, k, v, a))
    state = state.contiguous()
    number = _words(q, v, a, rounded)
    if number == "bfloat16" or (number and q.shape[2] < v.shape[2]):  # without shared scores, steps are as fast
        from recurra.ops.gate_loop._chunks_cpu import forward_floats
        from recurra.ops.gate_loop._chunks_cpu import forward_kernel as of_chunks

        after = state.data_ptr(), _describe(y), last.data_ptr(), kept.data_ptr() if keep else 0
        if _run_chunks(of_chunks, forward_floats, number, q, k, v, a, (), after):
            return
    if q.shape[2] != v.shape[2]:
        _run(results, of_all_heads(q, v), of_all_heads(k, v), v, a, state, keep, rounded)
        return
    exact = kept if kept.dtype == q.dtype else q.new_empty(kept.shape)
    sizes, vectors = _sizes(q, v, a), _vectors(v.shape[3] * _floats(v))
    scratch = _scratch(q, sizes[-1] * q.shape[3] * vectors * _WIDTH)
    _cpu().forward_kernel(_NUMBERS[q.dtype.to_real()], q.is_complex(), vectors)(
        *map(_describe, (q, k, v, a)), state.data_ptr(), _describe(y), last.data_ptr(),
        exact.data_ptr() if keep else 0, scratch.data_ptr(), *sizes,
        jobs=sizes[-1], work=q.shape[1] * state.numel(),
    )  # fmt: skip
    if exact is not kept:
        kept.copy_(exact)


def _check_back(dy, dlast, q, k, v, a, kept, with_gates, rounded):  # type: ignore[no-untyped-def]
    _check(q, k, v, a)
    require_layouts(_kept_dtype(q, v, a, rounded), q.device, kept=(kept, _kept_shape(q, v)))
    require_layouts(q.dtype, q.device, dy=(dy, v.shape), dlast=(dlast, _state_shape(q, v)))


def _allocate_back(dy, dlast, q, k, v, a, kept, with_gates, rounded):  # type: ignore[no-untyped-def]
    gates = a if with_gates else a[..., :0]
    return *map(empty_result, (q, k, v, gates)), q.new_empty(_state_shape(q, v))


def _run_back(results, dy, dlast, q, k, v, a, kept, with_gates, rounded):  # type: ignore[no-untyped-def]
    dq, dk, dv, da, dstate = results
    dlast = torch.zeros_like(dstate) if dlast is None else dlast.contiguous()
    if 0 in (q.numel(), v.numel()):
        dq.zero_(), dk.zero_(), dv.zero_(), da.zero_(), dstate.copy_(dlast)
        return
    dy = v.new_zeros((1, 1, 1, v.shape[3])).expand(v.shape) if dy is None else dy
    dy, q, k, v, a = (last_dim_contiguous(x) for x in (dy, q, k, v, a))
    kept = kept.contiguous()
    if number := _words(q, v, a, rounded):
        from recurra.ops.gate_loop._chunks_cpu_backward import backward_floats
        from recurra.ops.gate_loop._chunks_cpu_backward import backward_kernel as of_chunks

        gates = _describe(da) if with_gates else (0, 0, 0, 0)
        after = kept.data_ptr(), dlast.data_ptr(), *map(_describe, (dq, dk, dv)), gates, dstate.data_ptr()
        if _run_chunks(of_chunks, backward_floats, number, q, k, v, a, (_describe(dy),), after):
            return
    if q.shape[2] != v.shape[2]:
        wide = of_all_heads(q, v), of_all_heads(k, v)
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in wide]
        _run_back((*found, dv, da, dstate), dy, dlast, *wide, v, a, kept, with_gates, rounded)
        for out, of_heads in zip((dq, dk), found):
            torch.sum(of_heads.unflatten(2, (q.shape[2], -1)), 3, out=out)
        return
    kept = kept.to(q.dtype)
    sizes, vectors = _sizes(q, v, a), _vectors(q.shape[3] * _floats(q))
    tiles = sizes[-2] + 2 if with_gates else 1  # the states of a chunk and the carry, or either in its turn
    scratch = _scratch(q, sizes[-1] * (tiles * v.shape[3] * vectors + v.shape[3] + _WIDTH) * _WIDTH)
    _cpu().backward_kernel(_NUMBERS[q.dtype.to_real()], q.is_complex(), vectors, with_gates)(
        *map(_describe, (dy, q, k, v, a)), kept.data_ptr(), dlast.data_ptr(),
        *map(_describe, (dq, dk, dv, da)), dstate.data_ptr(), scratch.data_ptr(),
        *sizes, jobs=sizes[-1], work=q.shape[1] * dstate.numel(),
    )  # fmt: skip


# FLOPs are counted for real numbers, as in the scan.
_operator = Operator(
    "gate_loop_heads(Tensor q, Tensor k, Tensor v, Tensor a, Tensor state, bool keep=False, bool rounded=False) -> "
    "(Tensor, Tensor, Tensor)",
    check=_check,
    allocate=_allocate,
    run=_run,
    flops=lambda q, k, v, *_: 5 * q[-1] * math.prod(v),
)
_back = Operator(
    "gate_loop_heads_backward(Tensor? dy, Tensor? dlast, Tensor q, Tensor k, Tensor v, Tensor a, Tensor kept, "
    "bool with_gates=True, bool rounded=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_back,
    allocate=_allocate_back,
    run=_run_back,
    flops=lambda dy, dlast, q, k, v, *_: 14 * q[-1] * math.prod(v),
)


def _forward(keep, q, k, v, a, state, rounded):  # type: ignore[no-untyped-def]
    results = _operator.behind_door(q, k, v, a, state, keep, rounded)
    return results, (q, k, v, a, state, results[2])


def _backward(gradients, saved, needs, rounded):  # type: ignore[no-untyped-def]
    q, k, v, a, _, kept = saved
    dq, dk, dv, da, dstate = _back(*gradients[:2], q, k, v, a, kept, needs[3], rounded)
    return dq, dk, dv, da if needs[3] else None, dstate


def _in_plain_torch(q, k, v, a, state, rounded):  # type: ignore[no-untyped-def]
    with without_autocast(v):  # it would round sums, too
        return chunk(of_all_heads(q, v), of_all_heads(k, v), v, a, state, "auto")


_heads = Differentiable(_forward, _backward, n_inputs=5, reference=_in_plain_torch, constant=(2,))


def _record(q, k, v, a, state, keep, rounded):  # type: ignore[no-untyped-def]
    y, last, kept = _heads(q, k, v, a, state, rounded)
    return y, last, kept if keep else state.new_empty(0)


_operator.record = _record


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
    """
    if q.is_complex() or k.is_complex() or v.is_complex():
        kind = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.promote_types(v.dtype, a.dtype))
        q, k, v, a, state = (x.to(kind) for x in (q, k, v, a, state))
    y, last = _chunk(q, k, v, a, state)
    return y, last


def _y_dtype(q: Tensor, a: Tensor) -> torch.dtype:
    return a.dtype if a.is_complex() else q.dtype


def _check_chunk(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> None:
    """Refuse what the kernels cannot take; `chunk_by_kernels` says what they can."""
    dtype, device, number = q.dtype, q.device, a.dtype
    if q.dim() != 4 or dtype not in _INPUTS or (dtype.is_complex and dtype != number):
        raise ValueError(sentence("q", kind_of(q), "(B, L, H, d_qk) of float16, bfloat16 or a's type"))
    if number not in _TRANSITIONS or a.dim() != 4 or (a.shape[-1] != 1 and a.shape[-1] != q.shape[-1]):
        expected = f"float32, float64, complex64 or complex128 (B, L, H, 1 or {q.shape[-1]})"
        raise ValueError(sentence("a", kind_of(a), expected))
    steps, (d_qk, d_v) = q.shape[:3], (q.shape[-1], v.shape[-1] if v.dim() else 0)
    require_layouts(dtype, device, k=(k, q.shape), v=(v, (*steps, d_v)))
    of_state = steps[0], steps[2], d_qk, d_v
    require_layouts(number, device, a=(a, (*steps, a.shape[-1])), state=(state, of_state))
    largest = _LARGEST_COMPLEX if number.is_complex else _LARGEST_REAL
    for name, size in (("d_qk", d_qk), ("d_v", d_v)):
        require(size <= largest, name, size, f"at most {largest}")


def _allocate_chunk(q, k, v, a, state):  # type: ignore[no-untyped-def]
    return v.new_empty(v.shape, dtype=_y_dtype(q, a)), state.new_empty(state.shape)


def _run_chunk(results, q, k, v, a, state):  # type: ignore[no-untyped-def]
    y, last = results
    if 0 in (q.numel(), v.numel()):
        y.zero_(), last.copy_(state)
        return
    from recurra.ops.gate_loop import _triton_chunk as triton_chunk

    triton_chunk.forward_into(y, last, *(last_dim_contiguous(x) for x in (q, k, v, a, state)))


def _check_chunk_back(dy, dlast, q, k, v, a, state):  # type: ignore[no-untyped-def]
    _check_chunk(q, k, v, a, state)
    require_layouts(_y_dtype(q, a), q.device, dy=(dy, v.shape))
    require_layouts(state.dtype, q.device, dlast=(dlast, state.shape))


def _run_chunk_back(results, dy, dlast, q, k, v, a, state):  # type: ignore[no-untyped-def]
    dq, dk, dv, da, dstate = results
    dy = v.new_zeros((1, 1, 1, 1), dtype=_y_dtype(q, a)).expand(v.shape) if dy is None else dy
    dlast = torch.zeros_like(dstate) if dlast is None else dlast
    if 0 in (q.numel(), v.numel()):
        dq.zero_(), dk.zero_(), dv.zero_(), da.zero_(), dstate.copy_(dlast)
        return
    from recurra.ops.gate_loop import _triton_chunk_backward as triton_chunk_backward

    inputs = (last_dim_contiguous(x) for x in (dy, dlast, q, k, v, a, state))
    triton_chunk_backward.backward_into(results, *inputs)


def _flops(q, k, v, *_):  # type: ignore[no-untyped-def]
    # scores and weighted sums in blocks, and the state read and added to; for real numbers, as in the scan
    return 2 * math.prod(q[:-1]) * (_BLOCK * (q[-1] + v[-1]) + 2 * q[-1] * v[-1])


_chunk_operator = Operator(
    "gate_loop_chunk(Tensor q, Tensor k, Tensor v, Tensor a, Tensor state) -> (Tensor, Tensor)",
    check=_check_chunk,
    allocate=_allocate_chunk,
    run=_run_chunk,
    flops=_flops,
    devices=("CPU", "CUDA"),
)
_chunk_back = Operator(
    "gate_loop_chunk_backward(Tensor? dy, Tensor? dlast, Tensor q, Tensor k, Tensor v, Tensor a, Tensor state) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_chunk_back,
    allocate=lambda dy, dlast, *inputs: tuple(x.new_empty(x.shape) for x in inputs),
    run=_run_chunk_back,
    flops=lambda dy, dlast, *inputs: 2 * _flops(*inputs),
    devices=("CPU", "CUDA"),
)


def _reference(q, k, v, a, state):  # type: ignore[no-untyped-def]
    with torch.autocast(a.device.type, enabled=False):  # it would round the matrix products to bfloat16
        y, last = chunk(q, k, v, a, state, "auto")
    return y.to(_y_dtype(q, a)), last


_chunk = Differentiable(
    lambda keep, *inputs: (_chunk_operator.behind_door(*inputs), inputs),
    lambda gradients, saved, needs: _chunk_back(*gradients, *saved),
    n_inputs=5,
    reference=_reference,
)
_chunk_operator.record = _chunk
