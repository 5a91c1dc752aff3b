"""The generalised delta rule: its front door, and its kernels on the CPU as operators with derivatives."""

import math
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.checks import kind_of, sentence
from recurra.ops._operator import (
    HALF,
    OneNode,
    Operator,
    addresses,
    is_any_length,
    keeping,
    require_layouts,
    usable_threads,
    without_autocast,
)
from recurra.ops._toolkit.backends import choose_backend
from recurra.ops._toolkit.memory import empty_result
from recurra.ops.delta_rule.operator import _EVERY, _FEW, _allocate, _check_inputs, _converted, _dense, _kept_shape
from recurra.ops.delta_rule.reference import generalised_chunk, generalised_recurrent
from recurra.ops.gate_loop.reference import check_shape


def _check(q, k, v, a, read, write, state, keep=False):  # type: ignore[no-untyped-def]
    """Refuse what the kernels cannot take: anything but float32 of these shapes."""
    if q.dim() != 4 or q.dtype != torch.float32:
        raise ValueError(sentence("q", kind_of(q), "float32 (B, L, H, d_qk)"))
    steps, d_v = q.shape[:3], v.shape[-1] if v.dim() else 0
    over_keys = {name: (x, q.shape) for name, x in (("k", k), ("a", a), ("read", read), ("write", write))}
    of_state = state, (steps[0], steps[2], q.shape[3], d_v)
    require_layouts(q.dtype, q.device, **over_keys, v=(v, (*steps, d_v)), state=of_state)


@cache
def _cpu() -> Any:
    from recurra.ops.delta_rule import _generalised_cpu

    return _generalised_cpu


def _run(results, q, k, v, a, read, write, state, keep):  # type: ignore[no-untyped-def]
    y, last, u, kept = results
    if 0 in (q.numel(), v.numel()):
        y.zero_(), last.copy_(state)
        return
    batch, length, heads, d_qk = q.shape
    workers, size = min(usable_threads(), batch * heads), _cpu().forward_scratch(d_qk)
    inputs, scratch = _dense(q, k, v, a, read, write, state), q.new_empty(workers * size)
    _cpu().generalised_delta_rule_forward(
        *addresses(*inputs, last, y), *(addresses(u, kept) if keep else (0, 0)), scratch.data_ptr(), size,
        batch, length, heads, d_qk, v.shape[3], _EVERY, workers, jobs=workers, work=length * state.numel(),
    )  # fmt: skip


def _check_back(dy, dlast, q, k, v, a, read, write, state, u, kept):  # type: ignore[no-untyped-def]
    _check(q, k, v, a, read, write, state)
    known = {"u": (u, v.shape), "kept": (kept, _kept_shape(q, v))}
    require_layouts(q.dtype, q.device, dy=(dy, v.shape), dlast=(dlast, state.shape), **known)


def _run_back(results, dy, dlast, q, k, v, a, read, write, state, u, kept):  # type: ignore[no-untyped-def]
    dy = torch.zeros_like(v) if dy is None else dy
    dlast = torch.zeros_like(state) if dlast is None else dlast
    if 0 in (q.numel(), v.numel()):
        for gradient in results[:6]:
            gradient.zero_()
        results[6].copy_(dlast)
        return
    batch, length, heads, d_qk = q.shape
    workers, size = min(usable_threads(), batch * heads), _cpu().backward_scratch(d_qk, _EVERY)
    inputs, scratch = _dense(dy, dlast, q, k, v, a, read, write, u, kept), q.new_empty(workers * size)
    _cpu().generalised_delta_rule_backward(
        *addresses(*inputs, *results, scratch), size, batch, length, heads, d_qk, v.shape[3], _EVERY,
        _cpu().rows_of_block(d_qk), _cpu()._pitch(d_qk), workers, jobs=workers, work=length * state.numel(),
    )  # fmt: skip


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor a, Tensor read, Tensor write, Tensor state"
_operator = Operator(
    f"generalised_delta_rule_fused({_INPUTS}, bool keep=False) -> (Tensor, Tensor, Tensor, Tensor)",
    check=_check,
    allocate=lambda q, k, v, a, read, write, state, keep: _allocate(q, k, v, a, read, state, keep),
    run=_run,
    flops=lambda q, k, v, *_: 8 * math.prod(q) * v[-1],  # a value read, two written, and the output
)
_back = Operator(
    f"generalised_delta_rule_fused_backward(Tensor? dy, Tensor? dlast, {_INPUTS}, Tensor u, Tensor kept) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_back,
    allocate=lambda dy, dlast, *inputs: tuple(map(empty_result, inputs[:7])),
    run=_run_back,
    # the state again, and nine products with their sums
    flops=lambda dy, dlast, q, k, v, *_: 22 * math.prod(q) * v[-1],
)


def _in_torch(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    return (generalised_recurrent if inputs[0].shape[1] <= _FEW else generalised_chunk)(*inputs)


_with_gradients = keeping(_operator, _back, 7, 2, reference=_in_torch)


def generalised_delta_rule(
    q: Float[Tensor, "B L H d_qk"],
    k: Float[Tensor, "B L H d_qk"],
    v: Float[Tensor, "B L H d_v"],
    a: Float[Tensor, "B L H d_qk"],
    read: Float[Tensor, "B L H d_qk"],
    write: Float[Tensor, "B L H d_qk"],
    state: Float[Tensor, "B H d_qk d_v"] | None = None,
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "B L H d_v"], Float[Tensor, "B H d_qk d_v"]]:
    """Compute h_t = (diag(a_t) + write_t^T read_t) h_{t-1} + k_t^T v_t, y_t = q_t h_t (arXiv 2503.14456).

    Vectors are rows and the state is (d_qk, d_v); the paper writes the transpose. `delta_rule` is the case write =
    -b k, read = a k, with values b v. Here what is removed, read and written can differ in direction, and in rate by
    channel: RWKV-7 has read = kk, of length 1, and write = -rate * kk.

    Args:
        q, k, v: queries, keys and values.
        a: decays, one per key channel. The rule is stable where diag(a) + write^T read never makes a vector longer.
        read: what reads the state before it decays.
        write: where that is written.
        state: h_0, zeros if None.
        backend: as for `recurra.linear_scan`. "numba" computes step by step, in float32. Plain torch, "reference",
            computes up to 4 steps one by one, and more in chunks of 64 by matrix products; there is no "triton".

    Returns:
        y and h_L. float16 and bfloat16 are computed in float32, also under autocast; y then has the type of q, k and v,
        and the state is float32 or better. Both can be differentiated in all inputs any number of times.

    Raises:
        TypeError: an argument is not a tensor of real floating-point numbers.
        ValueError: shapes or devices do not fit, or the backend does not exist or is not for such inputs.
        RuntimeError: the backend cannot run here.
    """
    over_keys = _check_inputs({"q": q, "k": k, "v": v, "a": a, "read": read, "write": write}, state)
    for name, x in (("a", a), ("read", read), ("write", write)):
        check_shape(name, x, over_keys)
    given, q, k, v, a, read, write, state = _converted(q, k, v, a, read, write, state=state)
    if backend == "auto" and is_any_length(q.shape[1]):
        y, last = _any_steps(q, k, v, a, read, write, state)
        return (y.to(given) if given in HALF else y), last
    obstacle = _why_not_kernels(choose_backend(backend, q.device), q)
    if obstacle and backend in ("numba", "triton"):
        raise ValueError(sentence("backend", repr(backend), "'auto' or 'reference'", obstacle))
    if 0 in (q.numel(), v.numel()):
        y, last = (q * k * a * read * write).sum(-1, keepdim=True) * v, state
    elif obstacle or (backend == "auto" and torch.compiler.is_compiling()):
        with without_autocast(q):
            y, last = _in_torch(q, k, v, a, read, write, state)
    else:
        y, last, *_ = _with_gradients(q, k, v, a, read, write, state)
    return (y.to(given) if given in HALF else y), last


_any_steps = OneNode(
    f"generalised_delta_rule({_INPUTS}) -> (Tensor, Tensor)",
    generalised_delta_rule,
    lambda q, k, v, a, read, write, state: (v.new_empty(v.shape), state.new_empty(state.shape)),
    n_inputs=7,
)


def _why_not_kernels(backend: str, q: Tensor) -> str:
    """Say why a backend has no kernels for such tensors; "" if it has."""
    if backend != "numba":
        return "the kernels are Numba's" if backend == "triton" else "it is plain torch"
    name = str(q.dtype).removeprefix("torch.")
    return "" if q.dtype == torch.float32 else f"the kernels compute in float32, not in {name}"
