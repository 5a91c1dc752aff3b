"""The public function of the GateLoop operator."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from recurra.checks import kind_of, require_layout, require_literal, sentence
from recurra.lengths import PackedSequences, check_cu_seqlens, check_reset, cut_transitions
from recurra.ops._operator import HALF, has_numbers, needs_gradient, without_autocast
from recurra.ops._toolkit.backends import choose_backend
from recurra.ops.gate_loop import reference as modes
from recurra.ops.gate_loop._heads import chunk_by_heads, chunk_by_kernels, of_all_heads, why_not_kernels
from recurra.ops.gate_loop.fused import Planes, fused, fused_complex, heads_without_gradient, takes_heads
from recurra.ops.gate_loop.reference import check_inputs, check_numbers, check_shape

Mode = Literal["auto", "recurrent", "scan", "chunk", "attention", "fused"]
_CHUNK_STATE, _CHUNK_STATES = 256, 2**18
"""Numbers in a head's state, and in all its states over the sequence, from which "chunk" in plain torch beats "scan":
measured on a CPU (docs/lab-log.md), not on a GPU."""
_REALS = (torch.float32, torch.float64)
_REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def gate_loop(
    q: Shaped[Tensor, "B L G d_qk"],
    k: Shaped[Tensor, "B L G d_qk"],
    v: Shaped[Tensor, "B L H d_v"],
    a: Shaped[Tensor, "B L H d_a"],
    *,
    state: Shaped[Tensor, "N H d_qk d_v"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
    cu_seqlens: Int[Tensor, " borders"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
) -> tuple[Shaped[Tensor, "B L H d_v"], Shaped[Tensor, "N H d_qk d_v"]]:
    """Compute h_n = h_{n-1} a_n + k_n^T v_n, y_n = q_n h_n (GateLoop (7)-(9)).

    For d_h > 1, a_n acts on the value side in GateLoop (7) and on the key side in GateLoop (15)-(21); they agree if a_n
    is one scalar per head. Here a_n is that scalar, or a vector on the key side.

    Args:
        q, k: queries and keys, real or complex. They have G = H heads, or a divisor of H: then H / G neighbouring heads
            of v share each of theirs.
        v: values, real or complex.
        a: transitions, real or complex, d_a = 1 (one per head) or d_qk (one per key channel).
        state: h_0, zeros if None.
        mode: how to compute it; all modes give the same result.
            "recurrent": step by step in plain torch, with the memory of one state.
            "scan": a linear scan over all states, in O(L H d_qk d_v) memory.
            "chunk": attention inside chunks of 64 steps and the recurrence between them, in matrix products, in
                O(L H (d_qk + d_v + 64)) memory for heads of up to 64 x 64. Triton has kernels for float32, float16 and
                bfloat16 and heads of up to 128 channels (64 if a, state or an input is complex). For anything else,
                "auto" uses plain torch on a GPU too, and "triton" raises. Numba's kernels take all sizes and types
                and need less memory: they go through time step by step, or in chunks if that is faster
                (float32, one transition per head). In Triton's kernels, an infinity or NaN makes results NaN from the
                start of its chunk; in the gradient of y, it makes gradients of the inputs NaN to the end of its chunk.
            "attention": the O(L^2) surrogate attention, GateLoop (14)-(21).
            "fused": one kernel forward and one backward, for d_qk = d_v = 1 and real q, k, v.
            "auto": "fused" if it applies, and everything is real or the kernels are Numba's; else "recurrent" for a
                single step, "chunk" for heads with more than one channel by Numba's kernels, and otherwise for large
                states of long sequences (d_qk d_v >= 256 and L d_qk d_v >= 2^18), and "scan" for the rest. "scan" also
                if torch.export traces it for any length.
        backend: as for `recurra.linear_scan`. "scan", "chunk" and "fused" have kernels.
        cu_seqlens: the offsets of N packed sequences in the inputs (1, T, H, d): N + 1 ascending integers from 0 to T.
            Each sequence is computed as it would be alone, from its own h_0 (N, H, d_qk, d_v) to its own h_L
            (`recurra.lengths.PackedSequences`); nothing passes from one to another.
        reset: True at the first step of each new sequence, which starts from zeros. The transition there is 0: no
            gradient passes, but 0 times NaN or infinity is NaN.

    Returns:
        y, complex if an input is, and h_L. float16 and bfloat16 are computed in float32; a real y has the type of q, k
        and v, and the state is float32 or better. Matrix products of "chunk" may round their factors, states among
        them, to bfloat16 if q, k and v are bfloat16 or autocast to it is on; sums and states stay in float32. On a
        CPU, those with AVX-512 BF16 do.

    Raises:
        TypeError: an argument is not a tensor of floating-point or complex numbers.
        ValueError: shapes or devices do not fit, the mode or backend does not exist or does not support the inputs.
        RuntimeError: the backend cannot run here, or the mode does not have it.
    """
    _check(q, k, v, a, state, mode, cu_seqlens)
    if reset is not None:
        check_reset(q, reset, cu_seqlens)
        a = cut_transitions(a, reset, a.dim())
    if cu_seqlens is not None:
        return _packed(q, k, v, a, state, cu_seqlens, mode, backend)
    return _compute(q, k, v, a, state, mode, backend)


def _compute(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor | None, mode: str, backend: str
) -> tuple[Tensor, Tensor]:
    """Convert the arguments, which are checked, to their dtypes, and run the mode."""
    is_plain = mode in ("recurrent", "attention")
    if is_plain and backend not in ("auto", "reference"):
        expected = f"'auto' or 'reference' for mode {mode!r}, which is plain torch"
        raise RuntimeError(sentence("backend", repr(backend), expected))
    kernels = choose_backend("reference" if is_plain else backend, q.device)
    chosen = _choose_mode(mode, q, k, v, a, state, kernels)
    by_heads = chosen == "chunk" and kernels == "numba"
    if not by_heads:
        q, k = of_all_heads(q, v), of_all_heads(k, v)
    rounded = q.dtype == k.dtype == v.dtype == torch.bfloat16 or _autocasts(q)
    given = compute = a.dtype
    is_one_type = (
        compute in _REALS and q.dtype == k.dtype == v.dtype == (a if state is None else state).dtype == compute
    )
    if not is_one_type:
        given = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        compute = torch.float32
        for x in (q, k, v, a, state):
            compute = compute if x is None else torch.promote_types(compute, x.dtype)
    by_kernels = chosen == "chunk" and kernels == "triton" and _chunk_has_kernels(q, v, compute, backend)
    if not is_one_type:
        if not (by_kernels and q.dtype == k.dtype == v.dtype in HALF):
            q, k, v = (x.to(compute if x.is_complex() else _REAL_OF.get(compute, compute)) for x in (q, k, v))
        a = a.to(compute)
        state = None if state is None else state.to(compute)
    if state is None:
        state = a.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    if 0 in (q.numel(), v.numel()):
        q, k = of_all_heads(q, v), of_all_heads(k, v)
        y, last = (q * k * a).sum(-1, keepdim=True) * v, state
    elif by_kernels:
        y, last = chunk_by_kernels(q, k, v, a, state)
    elif by_heads:
        y, last = chunk_by_heads(q, k, v, a, state, rounded)
    else:
        # Autocast would run the matrix products of "chunk" and "attention" in bfloat16; "fused" has none.
        with nullcontext() if chosen == "fused" else without_autocast(a):
            y, last = _MODES[chosen](q, k, v, a, state, backend)
    return (y.to(given) if given in HALF and not y.is_complex() else y), last


def _autocasts(x: Tensor) -> bool:
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16


def _packed(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor | None, cu_seqlens: Tensor, mode: str, backend: str
) -> tuple[Tensor, Tensor]:
    """Pad the sequences into batches; after the end of each, a = 1 and k = 0 keep its state as it is."""
    kernels = choose_backend(backend, q.device)
    packed, chosen = PackedSequences(cu_seqlens, q), _choose_mode(mode, q, k, v, a, state, kernels)
    if mode == "auto" and chosen == "recurrent":  # a mode of plain torch, which the caller has not asked for
        backend = "auto"
    inputs = [packed.padded(x, padding) for x, padding in ((q, 0.0), (k, 0.0), (v, 0.0), (a, 1.0))]
    outputs, states = [], []
    for *batch, h0 in zip(*inputs, packed.states(state)):
        y, last = gate_loop(*batch, state=h0, mode=chosen, backend=backend)
        outputs.append(y)
        states.append(last)
    return packed.packed(outputs), packed.in_order(states)


def gate_loop_real_part(
    q: Shaped[Tensor, "B L H d_qk"],
    k: Shaped[Tensor, "B L H d_qk"],
    v: Shaped[Tensor, "B L H d_v"],
    a: Planes,
    *,
    state: Shaped[Tensor, "B H d_qk d_v"],
    backend: str = "auto",
) -> tuple[Shaped[Tensor, "B L H d_v"], Shaped[Tensor, "B H d_qk d_v"]]:
    """Compute Re(y) and h_L of `gate_loop` for real q, k, v and a in planes, as the layer does (GateLoop App. C).

    The imaginary half of y is never formed. For d_h = 1 the kernels take q, k and v in their own type, bfloat16 too.

    Raises:
        ValueError: a tensor has another shape or device than above; for d_h = 1, `state` has another type than a.
    """
    if not (q.shape[-1] == v.shape[-1] == 1 and q.numel()):
        if a.im is not None:
            require_layout("a.im", a.im, a.re.shape, a.re.dtype, a.re.device)
        y, last = gate_loop(q, k, v, _join(a), state=state, backend=backend)
        return y.real.to(q.dtype), last
    plane = torch.promote_types(a.re.dtype, torch.float32)
    _check_real_part(q, k, v, a, state, plane)
    given = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    number = given if given == torch.bfloat16 and plane == torch.float32 else plane
    if not q.dtype == k.dtype == v.dtype == number:
        q, k, v = q.to(number), k.to(number), v.to(number)
    if a.re.dtype != plane or (a.im is not None and a.im.dtype != plane):
        a = Planes(a.re.to(plane), None if a.im is None else a.im.to(plane))
    y, _, last = _by_fused(q, k, v, a, state, backend)
    return y if y.dtype == given else y.to(given), last


def _by_fused(
    q: Tensor, k: Tensor, v: Tensor, a: Planes, state: Tensor, backend: str, keep_states: bool = False
) -> tuple[Tensor, Planes, Tensor]:
    """Call `fused` for heads of one channel: Re y, the states that it returns, and h_L as `gate_loop` returns it."""
    chosen, is_complex = choose_backend(backend, q.device), a.im is not None
    has_heads = takes_heads(chosen, q, k, v, *a, state)
    if has_heads and not needs_gradient(q, k, v, *a, state) and state.is_complex() == is_complex:
        y, last = heads_without_gradient(q, k, v, a, state)
        return y, Planes(y, None), last
    if not has_heads:
        q, k, v, state = q.squeeze(-1), k.squeeze(-1), v.squeeze(-1), state.squeeze(-1).squeeze(-1)
        a = Planes(a.re.squeeze(-1), None if a.im is None else a.im.squeeze(-1))
    found = fused(q, k, v, a, _planes(state, is_complex), backend=chosen, keep_states=keep_states)
    h = _join(found.last)
    if has_heads:
        return found.y, found.states, h
    re, im = found.states
    states = Planes(re.unsqueeze(-1), None if im is None else im.unsqueeze(-1))
    return found.y.unsqueeze(-1), states, h.unsqueeze(-1).unsqueeze(-1)


def _check_real_part(q: Tensor, k: Tensor, v: Tensor, a: Planes, state: Tensor, plane: torch.dtype) -> None:
    """For d_h = 1: one shape and device for all but the state, which has the planes' type."""
    shape, device = q.shape, q.device
    if len(shape) != 4:
        raise ValueError(sentence("q", kind_of(q), "(B, L, H, 1)"))
    if plane.is_complex:
        raise ValueError(sentence("a.re", kind_of(a.re), "real numbers"))
    for name, tensor in (("k", k), ("v", v), ("a.re", a.re), ("a.im", a.im)):
        if tensor is not None and (tensor.shape != shape or tensor.device != device):
            require_layout(name, tensor, shape, tensor.dtype, device)
    number = plane if a.im is None or not state.is_complex() else torch.promote_types(plane, torch.complex64)
    require_layout("state", state, (shape[0], shape[2], 1, 1), number, device)


def _fused_mode(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Run the fused kernels on tensors of one compute type; the imaginary part of y follows from Triton's states."""
    is_complex = a.is_complex()
    if is_complex and choose_backend(backend, q.device) == "numba":
        q, k, v, a = (x.squeeze(-1) for x in (q, k, v, a))
        y, last = fused_complex(q, k, v, a, state.squeeze(-1).squeeze(-1))
        return y.unsqueeze(-1), last.unsqueeze(-1).unsqueeze(-1)
    y, states, last = _by_fused(q, k, v, _planes(a, is_complex), state, backend, keep_states=is_complex)
    return y if states.im is None else torch.complex(y, q * states.im), last


_MODES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "recurrent": modes.recurrent,
    "scan": modes.scan,
    "chunk": modes.chunk,
    "attention": modes.attention,
    "fused": _fused_mode,
}


def _chunk_has_kernels(q: Tensor, v: Tensor, compute: torch.dtype, backend: str) -> bool:
    obstacle = why_not_kernels(q.shape[-1], v.shape[-1], compute)
    if obstacle and backend == "triton":
        raise ValueError(sentence("backend", "'triton'", "'auto', which uses plain torch here", obstacle))
    return not obstacle


def _planes(x: Tensor, is_complex: bool) -> Planes:
    if is_complex:
        return Planes(x.real, x.imag) if x.is_complex() else Planes(x, torch.zeros_like(x))
    return Planes(x, None)


def _join(planes: Planes) -> Tensor:
    return planes.re if planes.im is None else torch.complex(planes.re, planes.im)


def _choose_mode(mode: str, q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor | None, backend: str) -> str:
    """Return the mode in which `gate_loop` computes: `mode` itself, or the choice of "auto" for this backend."""
    (_, length, _, d_qk), d_v = q.shape, v.shape[3]
    fits_fused = d_qk == d_v == 1 and not (q.is_complex() or k.is_complex() or v.is_complex())
    if mode == "fused" and not fits_fused:
        what = "real q, k and v" if d_qk == d_v == 1 else f"d_qk = d_v = 1, not {d_qk} and {d_v}"
        raise ValueError(sentence("mode", "'fused'", "'auto' or another mode", f"'fused' takes {what}"))
    if mode != "auto":
        return mode
    if fits_fused and not any(x is not None and x.is_complex() for x in (a, state)):
        return "fused"
    if isinstance(length, torch.SymInt):  # traced for any length, short or long
        return "scan"
    if length == 1 and not has_numbers(q):  # an export, or a step that is recorded, has rules for its operations
        return "recurrent"
    # Triton's kernels keep all states for a complex y, and multiply once more.
    if fits_fused and backend == "numba":
        return "fused"
    if length == 1:
        return "recurrent"
    if d_qk * d_v > 1 and backend == "numba":
        return "chunk"
    return "chunk" if d_qk * d_v >= _CHUNK_STATE and length * d_qk * d_v >= _CHUNK_STATES else "scan"


def _check(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor | None, mode: str, cu_seqlens: Tensor | None
) -> None:
    require_literal(Mode, mode=mode)
    check_inputs(q, k, v, a, grouped=True)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *q.shape[:2])
    if state is not None:
        check_numbers("state", state, q, "(B, H, d_qk, d_v)")
        n_states = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        check_shape("state", state, (n_states, v.shape[2], q.shape[3], v.shape[3]))
