"""The gated delta rule: the public function, and its kernels, by steps and in chunks, as operators with derivatives."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.checks import kind_of, require_literal, require_tensor, sentence
from recurra.ops._operator import (
    HALF,
    Differentiable,
    OneNode,
    Operator,
    addresses,
    is_any_length,
    keeping,
    require_layouts,
    usable_threads,
    without_autocast,
)
from recurra.ops._toolkit.backends import NUMBA_IS_MISSING, TRITON_IS_MISSING, choose_backend
from recurra.ops._toolkit.memory import empty_result, in_huge_pages
from recurra.ops.delta_rule.reference import chunk, recurrent
from recurra.ops.gate_loop._heads import why_not_kernels
from recurra.ops.gate_loop.reference import check_shape


def _check_inputs(named: dict[str, Tensor], state: Tensor | None) -> tuple[int, int, int, int]:
    """Refuse what makes no delta rule, generalised or not, but for the shapes of gates; return the shape of q."""
    q, v = named["q"], named["v"]
    for name, tensor in (named if state is None else {**named, "state": state}).items():
        require_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise TypeError(sentence(name, kind_of(tensor), "real floating-point numbers"))
        if tensor.device != q.device:
            raise ValueError(sentence(name, kind_of(tensor), f"a tensor on {q.device}, as q"))
    for name, tensor in (("q", q), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(sentence(name, kind_of(tensor), "(B, L, H, d)"))
    batch, length, heads, d_qk = q.shape
    check_shape("k", named["k"], (batch, length, heads, d_qk))
    check_shape("v", v, (batch, length, heads, v.shape[3]))
    if state is not None:
        check_shape("state", state, (batch, heads, d_qk, v.shape[3]))
    return batch, length, heads, d_qk


def _converted(q, k, v, *gates, state):  # type: ignore[no-untyped-def]
    """Return the type of q, k and v, and all inputs in the type of the computation; a state of None is zeros."""
    given = (
        q.dtype
        if q.dtype == k.dtype == v.dtype
        else torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    )
    compute = torch.float32
    for x in (q, k, v, *gates, state):
        if x is not None and x.dtype != compute:
            compute = torch.promote_types(compute, x.dtype)
    q, k, v, *others = (x if x.dtype == compute else x.to(compute) for x in (q, k, v, *gates))
    state = v.new_zeros(q.shape[0], *q.shape[2:], v.shape[3]) if state is None else state
    return given, q, k, v, *others, state if state.dtype == compute else state.to(compute)


_MOST_KEYS = 256
"""The most key channels that Triton's kernels take: a thread then has 32 numbers of each state."""


def _why_not_fused(backend: str, q: Tensor) -> str:
    """Say why a backend has no kernels for q and the others, of its type; "" if it has."""
    if backend == "triton":
        few = q.shape[3] <= _MOST_KEYS
        return "" if few else f"Triton's kernels take up to {_MOST_KEYS} key channels a head, not {q.shape[3]}"
    if q.is_cuda:
        return TRITON_IS_MISSING or "backend 'reference' is plain torch"
    if q.device.type != "cpu":
        return f"the kernels run on the CPU and on CUDA, and the tensors are on {q.device}"
    if q.dtype != torch.float32:
        return f"the kernels compute in float32, not in {str(q.dtype).removeprefix('torch.')}"
    return NUMBA_IS_MISSING or ("" if backend == "numba" else "backend 'reference' is plain torch")


_EVERY = 32
"""Steps between two states that the forward pass keeps: with heads of 64 channels, they take twice the memory of v."""


def _kept_shape(q: Tensor, v: Tensor) -> tuple[int, int, int]:
    """The states that enter the first and every `_EVERY`th step after it: (B, H, chunks, d_qk, d_v) in memory.

    One dimension has heads, chunks and d_qk: a trace for any length would ask whether there is one chunk.
    """
    return q.shape[0], q.shape[2] * ((q.shape[1] + _EVERY - 1) // _EVERY) * q.shape[3], v.shape[3]


def _is_for_triton(q: Tensor, backend: str) -> bool:
    return q.is_cuda or backend == "triton"


def _check(q, k, v, a, b, state, keep=False, backend="auto"):  # type: ignore[no-untyped-def]
    """Refuse what the kernels cannot take: q (B, L, H, d_qk), a of 1 or d_qk channels; float64 only by Triton."""
    wide = q.dtype == torch.float64 and _is_for_triton(q, backend)
    if q.dim() != 4 or not (wide or q.dtype == torch.float32):
        raise ValueError(sentence("q", kind_of(q), "float32 (B, L, H, d_qk)"))
    steps, d_v = q.shape[:3], v.shape[-1] if v.dim() else 0
    of_a, of_state = q.shape if a.shape == q.shape else (*steps, 1), (steps[0], steps[2], q.shape[3], d_v)
    of_values = {"v": (v, (*steps, d_v)), "a": (a, of_a), "b": (b, (*steps, 1)), "state": (state, of_state)}
    require_layouts(q.dtype, q.device, k=(k, q.shape), **of_values)


def _allocate(q, k, v, a, b, state, keep, backend="auto"):  # type: ignore[no-untyped-def]
    u, kept = (v.shape, _kept_shape(q, v)) if keep else ((0,), (0,))
    # numbers: torch takes twice as long to read a torch.Size
    return (
        empty_result(v),
        state.new_empty(*state.shape),
        in_huge_pages(v.new_empty(*u)),
        in_huge_pages(state.new_empty(*kept)),
    )


@cache
def _cpu() -> Any:
    """The module of the kernels, which loads Numba; importing it at every call takes as long as a kernel does."""
    from recurra.ops.delta_rule import _cpu as module

    return module


def _dense(*tensors: Tensor) -> list[Tensor]:
    return [x.resolve_neg().contiguous() for x in tensors]


def _run(results, q, k, v, a, b, state, keep, backend="auto"):  # type: ignore[no-untyped-def]
    y, last, u, kept = results
    if 0 in (q.numel(), v.numel()):
        y.zero_(), last.copy_(state)
        return
    if _is_for_triton(q, backend):
        from recurra.ops.delta_rule import _triton

        _triton.forward_into(y, last, u, kept, _EVERY, *_dense(q, k, v, a, b, state))
        return
    batch, length, heads, d_qk = q.shape
    workers, size, inputs = (
        min(usable_threads(), batch * heads),
        _cpu().forward_scratch(d_qk),
        _dense(q, k, v, a, b, state),
    )
    scratch = q.new_empty(workers * size)
    _cpu().delta_rule_forward(
        *addresses(*inputs, last, y), *(addresses(u, kept) if keep else (0, 0)), scratch.data_ptr(), size,
        batch, length, heads, d_qk, v.shape[3], a.shape[3], _EVERY, workers, jobs=workers, work=length * state.numel(),
    )  # fmt: skip


def _check_back(dy, dlast, q, k, v, a, b, state, u, kept, backend="auto"):  # type: ignore[no-untyped-def]
    _check(q, k, v, a, b, state, True, backend)
    known = {"u": (u, v.shape), "kept": (kept, _kept_shape(q, v))}
    require_layouts(q.dtype, q.device, dy=(dy, v.shape), dlast=(dlast, state.shape), **known)


def _run_back(results, dy, dlast, q, k, v, a, b, state, u, kept, backend="auto"):  # type: ignore[no-untyped-def]
    dy = torch.zeros_like(v) if dy is None else dy
    dlast = torch.zeros_like(state) if dlast is None else dlast
    if 0 in (q.numel(), v.numel()):
        for gradient in results[:5]:
            gradient.zero_()
        results[5].copy_(dlast)
        return
    if _is_for_triton(q, backend):
        from recurra.ops.delta_rule import _triton

        _triton.backward_into(results, _EVERY, *_dense(dy, dlast, q, k, a, b, u, kept))
        return
    batch, length, heads, d_qk = q.shape
    workers, size = min(usable_threads(), batch * heads), _cpu().backward_scratch(d_qk, _EVERY)
    inputs, scratch = _dense(dy, dlast, q, k, a, b, u, kept), q.new_empty(workers * size)
    _cpu().delta_rule_backward(
        *addresses(*inputs, *results, scratch), size, batch, length, heads, d_qk, v.shape[3], a.shape[3], _EVERY,
        _cpu().rows_of_block(d_qk), workers, jobs=workers, work=length * state.numel(),
    )  # fmt: skip


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor state"
_operator = Operator(
    f'delta_rule_fused({_INPUTS}, bool keep=False, str backend="auto") -> (Tensor, Tensor, Tensor, Tensor)',
    check=_check,
    allocate=_allocate,
    run=_run,
    flops=lambda q, k, v, *_: 6 * math.prod(q) * v[-1],  # a value read, one written, and the output
    devices=("CPU", "CUDA"),
)
_back = Operator(
    f'delta_rule_fused_backward(Tensor? dy, Tensor? dlast, {_INPUTS}, Tensor u, Tensor kept, str backend="auto") -> '
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_back,
    allocate=lambda dy, dlast, *inputs: tuple(map(empty_result, inputs[:6])),
    run=_run_back,
    # the state again, and seven products with their sums
    flops=lambda dy, dlast, q, k, v, *_: 16 * math.prod(q) * v[-1],
    devices=("CPU", "CUDA"),
)


_with_gradients = keeping(
    _operator, _back, 6, 2, reference=lambda q, *others: _MODES[_without_kernels(q)](q, *others[:5])
)


def _fused(*inputs: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    y, last, *_ = _with_gradients(*inputs, backend)
    return y, last


def _check_chunk(q, k, v, a, b, state):  # type: ignore[no-untyped-def]
    _check(q, k, v, a, b, state, backend="triton")


def _run_chunk(results, *inputs):  # type: ignore[no-untyped-def]
    y, last, u = results
    if 0 in (inputs[0].numel(), y.numel()):
        y.zero_(), u.zero_(), last.copy_(inputs[5])
        return
    from recurra.ops.delta_rule import _triton_chunk

    _triton_chunk.forward_into(y, last, u, *_dense(*inputs))


def _check_chunk_back(dy, dlast, q, k, v, a, b, state, u):  # type: ignore[no-untyped-def]
    _check_chunk(q, k, v, a, b, state)
    require_layouts(q.dtype, q.device, dy=(dy, v.shape), dlast=(dlast, state.shape), u=(u, v.shape))


def _run_chunk_back(results, dy, dlast, q, k, v, a, b, state, u):  # type: ignore[no-untyped-def]
    dy = torch.zeros_like(v) if dy is None else dy
    dlast = torch.zeros_like(state) if dlast is None else dlast
    if 0 in (q.numel(), v.numel()):
        for gradient in results[:5]:
            gradient.zero_()
        results[5].copy_(dlast)
        return
    from recurra.ops.delta_rule import _triton_chunk

    _triton_chunk.backward_into(results, *_dense(dy, dlast, q, k, a, b, u, state))


def _chunk_flops(q, k, v, *_):  # type: ignore[no-untyped-def]
    # what is read of the state and added to it, twice: for u and for y; and the products within chunks of 16 steps
    return math.prod(q[:-1]) * (8 * q[-1] * v[-1] + 32 * (3 * q[-1] + 2 * v[-1]))


_chunk_operator = Operator(
    f"delta_rule_chunk({_INPUTS}) -> (Tensor, Tensor, Tensor)",
    check=_check_chunk,
    allocate=lambda q, k, v, a, b, state: (v.new_empty(v.shape), state.new_empty(state.shape), v.new_empty(v.shape)),
    run=_run_chunk,
    flops=_chunk_flops,
    devices=("CPU", "CUDA"),
)
_chunk_back = Operator(
    f"delta_rule_chunk_backward(Tensor? dy, Tensor? dlast, {_INPUTS}, Tensor u) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_chunk_back,
    allocate=lambda dy, dlast, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:6]),
    run=_run_chunk_back,
    flops=lambda dy, dlast, *inputs: 3 * _chunk_flops(*inputs),
    devices=("CPU", "CUDA"),
)


def _chunk_forward(keep, *inputs):  # type: ignore[no-untyped-def]
    results = _chunk_operator.behind_door(*inputs)
    return results, (*inputs, results[2])


_chunk = Differentiable(
    _chunk_forward,
    lambda gradients, saved, needs: _chunk_back(*gradients[:2], *saved),
    n_inputs=6,
    reference=chunk,
    constant=(2,),
)
_chunk_operator.record = _chunk


def chunk_by_kernels(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (y, h_L) like `chunk`, by Triton's kernels, which take float32; float64 is for tests."""
    y, last, *_ = _chunk(*inputs)
    return y, last


Mode = Literal["auto", "recurrent", "chunk", "fused"]
_BY_KERNELS = "chunk, by kernels"
_FEW = 4  # the most steps that "auto" computes one by one without kernels: measured on a CPU (docs/lab-log.md)

_MODES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "recurrent": recurrent,
    "chunk": chunk,
    _BY_KERNELS: chunk_by_kernels,
    "fused": _fused,
}


def delta_rule(
    q: Float[Tensor, "B L H d_qk"],
    k: Float[Tensor, "B L H d_qk"],
    v: Float[Tensor, "B L H d_v"],
    a: Float[Tensor, "B L H *a_channels"],
    b: Float[Tensor, "B L H *b_channels"],
    state: Float[Tensor, "B H d_qk d_v"] | None = None,
    *,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "B L H d_v"], Float[Tensor, "B H d_qk d_v"]]:
    """Compute h_t = (I - b_t k_t^T k_t) diag(a_t) h_{t-1} + b_t k_t^T v_t, y_t = q_t h_t: the gated delta rule.

    With one decay per head, this is the rule of Yang, Kautz and Hatamizadeh, arXiv 2412.06464; with one per key
    channel, Kimi Delta Attention (arXiv 2510.26692); and with a = 1, the delta rule of Yang et al., arXiv 2406.06484.
    Vectors are rows and the state is (d_qk, d_v), as in `recurra.gate_loop`; the first and the last paper write the
    transpose. With b = 0, nothing is written and the state decays. With b = 1 and a key of length 1, v replaces the
    value stored under that key. With one decay per head, the transition has the eigenvalue a (1 - b |k|^2) along k and
    a across it. With |k| = 1 and b between 1 and 2, the former is negative (Grazzi et al., arXiv 2411.12537).

    Args:
        q, k: queries and keys. The rule is stable for b |k|^2 of at most 2; keys are not normalised here.
        v: values.
        a: decays, one per head, (B, L, H) or (B, L, H, 1), or one per key channel, (B, L, H, d_qk), in [0, 1]; larger
            values are allowed.
        b: share of the difference that is written, (B, L, H) or (B, L, H, 1), in [0, 2].
        state: h_0, zeros if None.
        mode: how to compute it; all modes give the same result.
            "recurrent": step by step in plain torch, in O(L) steps.
            "chunk": chunks of 64 steps by matrix products and a triangular solve, and the recurrence between them; on
                CUDA, chunks of 16 by Triton kernels, in float32 for heads of up to 128 channels.
            "fused": step-by-step kernels: Numba on the CPU in float32, Triton on CUDA for heads of up to 256 key
                channels. Under torch.func, it uses one of the other modes.
            "auto": "fused" if it applies, on CUDA for up to 64 key channels; else "recurrent" for up to 4 steps, and
                "chunk" for more.
        backend: as for `recurra.linear_scan`. Only "fused" has kernels for the CPU, and "recurrent" has none.

    Returns:
        y and h_L. float16 and bfloat16 are computed in float32, also under autocast; y then has the type of q, k and v,
        and the state is float32 or better. Both can be differentiated in all inputs any number of times.

    Raises:
        TypeError: an argument is not a tensor of real floating-point numbers.
        ValueError: shapes or devices do not fit, or the mode or backend does not exist or does not support the inputs.
        RuntimeError: the backend cannot run here, or the mode does not have it.
    """
    require_literal(Mode, mode=mode)
    over_keys = _check_inputs({"q": q, "k": k, "v": v, "a": a, "b": b}, state)
    steps = over_keys[:3]
    check_shape("a", a, steps, (*steps, 1), over_keys)
    check_shape("b", b, steps, (*steps, 1))
    given, q, k, v, a, b, state = _converted(q, k, v, a, b, state=state)
    a, b = (x if x.dim() == 4 else x.unsqueeze(-1) for x in (a, b))
    if mode == backend == "auto" and is_any_length(q.shape[1]):
        y, last = _any_steps(q, k, v, a, b, state)
        return (y.to(given) if given in HALF else y), last
    chosen = choose_backend(backend, q.device)
    mode = _choose_mode(mode, chosen, backend in ("numba", "triton"), q, v)
    if 0 in (q.numel(), v.numel()):
        y, last = (q * k * a * b).sum(-1, keepdim=True) * v, state
    else:
        # Autocast would run the matrix products in bfloat16.
        with without_autocast(q):
            options = {"backend": chosen} if mode == "fused" else {}
            y, last = _MODES[mode](q, k, v, a, b, state, **options)
    return (y.to(given) if given in HALF else y), last


_any_steps = OneNode(
    "delta_rule(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor state) -> (Tensor, Tensor)",
    delta_rule,
    lambda q, k, v, a, b, state: (v.new_empty(v.shape), state.new_empty(state.shape)),
    n_inputs=6,
)


def _takes_much_memory(backend: str, q: Tensor) -> bool:
    """Triton's backward pass has shares of the gradients of q and k: 4 of each with 64 key channels, 16 with 128."""
    return backend == "triton" and q.shape[3] > 64


def _choose_mode(mode: str, backend: str, by_name: bool, q: Tensor, v: Tensor) -> str:
    """Return `mode` itself, or the choice of "auto"; `by_name` if the caller wants this backend's kernels."""
    if mode == "chunk" and backend == "triton":
        obstacle = why_not_kernels(q.shape[3], v.shape[3], q.dtype)
        if obstacle and by_name:
            raise ValueError(sentence("backend", "'triton'", "'auto' or 'reference'", obstacle))
        return mode if obstacle else _BY_KERNELS
    if mode not in ("auto", "fused"):
        if by_name:
            expected = f"'auto' or 'reference' for mode {mode!r}, which is plain torch"
            raise RuntimeError(sentence("backend", repr(backend), expected))
        return mode
    obstacle = _why_not_fused(backend, q)
    is_wanted = mode == "fused" or by_name
    if not obstacle and (is_wanted or not (torch.compiler.is_compiling() or _takes_much_memory(backend, q))):
        return "fused"
    if by_name:
        raise ValueError(sentence("backend", repr(backend), "'auto' or 'reference'", obstacle))
    if mode == "fused":
        raise ValueError(sentence("mode", "'fused'", "'auto' or another mode", obstacle))
    mode = _without_kernels(q)
    return mode if torch.compiler.is_compiling() else _choose_mode(mode, backend, False, q, v)


def _without_kernels(q: Tensor) -> str:
    return "recurrent" if q.shape[1] <= _FEW else "chunk"
