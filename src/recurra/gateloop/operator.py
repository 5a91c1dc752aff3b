"""The front door of the GateLoop operator."""

from collections.abc import Callable

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from recurra.checks import kind_of, require_layout, sentence
from recurra.gateloop import modes
from recurra.gateloop.chunk import chunk
from recurra.gateloop.chunk_operator import chunk_by_kernels, why_not_kernels
from recurra.gateloop.fused import Planes, fused
from recurra.kernels.backends import choose_backend
from recurra.kernels.tensors import HALF
from recurra.lengths.packed import PackedSequences, check_cu_seqlens

MODES = ("auto", "recurrent", "scan", "chunk", "attention", "fused")
_CHUNK_STATE, _CHUNK_STATES = 256, 2**18
"""Numbers in a head's state, and in all its states over the sequence, from which on "chunk" beats "scan": measured on a
CPU (docs/decisions.md); not measured on a GPU."""
_REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def gate_loop(
    q: Shaped[Tensor, "B L H d_qk"],
    k: Shaped[Tensor, "B L H d_qk"],
    v: Shaped[Tensor, "B L H d_v"],
    a: Shaped[Tensor, "B L H d_a"],
    *,
    state: Shaped[Tensor, "N H d_qk d_v"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
    cu_seqlens: Int[Tensor, " borders"] | None = None,
) -> tuple[Shaped[Tensor, "B L H d_v"], Shaped[Tensor, "N H d_qk d_v"]]:
    """Compute h_n = h_{n-1} a_n + k_n^T v_n, y_n = q_n h_n (GateLoop (7)-(9)).

    For d_h > 1 GateLoop (7) lets a_n act on the value side and GateLoop (15)-(21) on the key side; they agree when a_n
    is one scalar per head. Here a_n is that scalar, or a vector on the key side.

    Args:
        q, k: queries and keys, real or complex.
        v: values, real or complex.
        a: transitions, real or complex, d_a = 1 (one per head) or d_qk (one per key channel).
        state: h_0, zeros when None.
        mode: how to compute it; all modes give the same result.
            "recurrent": step by step in plain torch, one state of memory.
            "scan": a linear scan over all states, O(L H d_qk d_v) memory.
            "chunk": attention inside chunks of 64 steps, the recurrence between them, in matrix products;
                O(L H (d_qk + d_v + 64)) memory for heads of up to 64 x 64. Triton has kernels for all of it, for
                float32, float16 and bfloat16 and heads of up to 128 channels (64 where a, state or an input is
                complex); for others "auto" takes plain torch on a GPU too, and "triton" raises.
            "attention": the O(L^2) surrogate attention, GateLoop (14)-(21).
            "fused": one kernel each way, for d_qk = d_v = 1 and real q, k, v.
            "auto": "fused" where it applies and all is real, else "recurrent" for a single step, "chunk" for large
                states of long sequences (d_qk d_v >= 256 and L d_qk d_v >= 2^18), else "scan"; that, too, where
                torch.export traces it for any length.
        backend: as for `recurra.linear_scan`; "scan" and "fused" have kernels, and "chunk" has Triton's, and Numba's
            between chunks.
        cu_seqlens: the borders of N sequences that lie end to end in the inputs (1, T, H, d): N + 1 ascending integers
            from 0 to T. Each is computed as it would be alone, from its own h_0 (N, H, d_qk, d_v) to its own h_L, in
            padded rows (`recurra.lengths.packed.PackedSequences`); nothing of one enters another.

    Returns:
        y, complex where an input is, and h_L. float16 and bfloat16 are computed in float32; a real y comes back in the
        type of q, k, v, the state stays float32 or better.

    Raises:
        TypeError, ValueError, RuntimeError: naming the argument, what came and what was expected.
    """
    _check(q, k, v, a, state, mode, cu_seqlens)
    if cu_seqlens is not None:
        return _packed(q, k, v, a, state, cu_seqlens, mode, backend)
    chosen = choose_mode(mode, q, k, v, a, state)
    if mode in ("recurrent", "attention") and backend not in ("auto", "reference"):
        raise RuntimeError(f'backend is {backend!r}, and mode "{chosen}" is plain torch; use "auto"')
    given = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    compute = _compute_dtype(q, k, v, a, state)
    by_kernels = chosen == "chunk" and _chunk_has_kernels(q, v, compute, backend)
    if not (by_kernels and q.dtype == k.dtype == v.dtype in HALF):
        q, k, v = (x.to(compute if x.is_complex() else _REAL_OF.get(compute, compute)) for x in (q, k, v))
    a = a.to(compute)
    if state is None:
        state = a.new_zeros((q.shape[0], *q.shape[2:], v.shape[3]))
    state = state.to(compute)
    if 0 in (q.numel(), v.numel()):
        y, last = (q * k * a).sum(-1, keepdim=True) * v, state
    elif by_kernels:
        y, last = chunk_by_kernels(q, k, v, a, state)
    else:
        # Autocast would take the matrix products of "chunk" and "attention" down to bfloat16.
        with torch.autocast(a.device.type, enabled=False):
            y, last = _MODES[chosen](q, k, v, a, state, backend)
    return (y.to(given) if given in HALF and not y.is_complex() else y), last


def _packed(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor | None, cu_seqlens: Tensor, mode: str, backend: str
) -> tuple[Tensor, Tensor]:
    """Sequences side by side as rows, behind whose ends the state stays as it is: a = 1, k = 0."""
    packed, mode = PackedSequences(cu_seqlens, q), choose_mode(mode, q, k, v, a, state)
    columns = [packed.padded(x, padding) for x, padding in ((q, 0.0), (k, 0.0), (v, 0.0), (a, 1.0))]
    outputs, states = [], []
    for *rows, h0 in zip(*columns, packed.states(state)):
        y, last = gate_loop(*rows, state=h0, mode=mode, backend=backend)
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
    """Compute Re(y) and h_L of `gate_loop` for real q, k, v and a gate in planes, as the layer does (GateLoop App. C).

    The imaginary half of y is never formed, and for d_h = 1 the kernels take q, k, v as they come, bfloat16 too.

    Raises:
        ValueError: a tensor is of another shape or device than above, or `state` of another type than the gates.
    """
    if not (q.shape[-1] == v.shape[-1] == 1 and q.numel()):
        if a.im is not None:
            require_layout("a.im", a.im, a.re.shape, a.re.dtype, a.re.device)
        y, last = gate_loop(q, k, v, _join(a), state=state, backend=backend)
        return (y.real if y.is_complex() else y).to(q.dtype), last
    plane = torch.promote_types(a.re.dtype, torch.float32)
    _check_real_part(q, k, v, a, state, plane)
    given = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    number = given if given == torch.bfloat16 and plane == torch.float32 else plane
    q, k, v = (x[..., 0].to(number) for x in (q, k, v))
    gates = Planes(a.re[..., 0].to(plane), None if a.im is None else a.im[..., 0].to(plane))
    h0 = _planes(state[..., 0, 0], a.im is not None)
    result = fused(q, k, v, gates, h0, backend=choose_backend(backend, q.device))
    return result.y[..., None].to(given), _join(result.last)[..., None, None]


def _check_real_part(q: Tensor, k: Tensor, v: Tensor, a: Planes, state: Tensor, plane: torch.dtype) -> None:
    """For d_h = 1: one shape for all but the state, which is in the planes' type; devices are the kernels' to check."""
    shape = q.shape
    if len(shape) != 4:
        raise ValueError(sentence("q", kind_of(q), "(B, L, H, 1)"))
    if k.shape != shape or v.shape != shape or a.re.shape != shape or (a.im is not None and a.im.shape != shape):
        for name, tensor in (("k", k), ("v", v), ("a.re", a.re), ("a.im", a.im)):
            if tensor is not None:
                require_layout(name, tensor, shape, tensor.dtype, q.device)
    number = plane if a.im is None or not state.is_complex() else torch.promote_types(plane, torch.complex64)
    require_layout("state", state, (shape[0], shape[2], 1, 1), number, q.device)


def _fused_mode(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """The fused kernels for tensors of one compute type; the imaginary part of y follows from the states."""
    q, k, v = (x[..., 0] for x in (q, k, v))
    gates, h0 = _planes(a[..., 0], a.is_complex()), _planes(state[..., 0, 0], a.is_complex())
    result = fused(q, k, v, gates, h0, backend=choose_backend(backend, q.device), keep_states=a.is_complex())
    y = result.y if result.states.im is None else torch.complex(result.y, q * result.states.im)
    return y[..., None], _join(result.last)[..., None, None]


_MODES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "recurrent": modes.recurrent,
    "scan": modes.scan,
    "chunk": chunk,
    "attention": modes.attention,
    "fused": _fused_mode,
}


def _chunk_has_kernels(q: Tensor, v: Tensor, compute: torch.dtype, backend: str) -> bool:
    if choose_backend(backend, q.device) != "triton":
        return False
    obstacle = why_not_kernels(q.shape[-1], v.shape[-1], compute)
    if obstacle and backend == "triton":
        raise ValueError(f'backend="triton" {obstacle}; use "auto", which takes plain torch there')
    return not obstacle


def _planes(x: Tensor, is_complex: bool) -> Planes:
    if is_complex:
        return Planes(x.real, x.imag) if x.is_complex() else Planes(x, torch.zeros_like(x))
    return Planes(x, None)


def _join(planes: Planes) -> Tensor:
    return planes.re if planes.im is None else torch.complex(planes.re, planes.im)


def choose_mode(mode: str, q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor | None = None) -> str:
    """Give the mode that `gate_loop` computes in: what "auto" stands for, and all others themselves.

    Raises:
        ValueError: the mode is "fused", which is not for such inputs.
    """
    obstacle = ""
    if q.shape[-1] != 1 or v.shape[-1] != 1:
        obstacle = f"d_qk = {q.shape[-1]} and d_v = {v.shape[-1]}; it is for d_qk = d_v = 1"
    elif q.is_complex() or k.is_complex() or v.is_complex():
        obstacle = "complex q, k or v; it is for real ones"
    if mode == "fused" and obstacle:
        raise ValueError(f'mode "fused" came with {obstacle}; use "auto"')
    if mode != "auto":
        return mode
    # for complex outputs "fused" keeps all states and multiplies once more, and "scan" is 1.2 to 1.6 times as fast
    if not obstacle and not any(x is not None and x.is_complex() for x in (a, state)):
        return "fused"
    if isinstance(q.shape[1], torch.SymInt):  # traced for any length, short or long
        return "scan"
    if q.shape[1] == 1:
        return "recurrent"
    per_state = q.shape[3] * v.shape[3]
    return "chunk" if per_state >= _CHUNK_STATE and q.shape[1] * per_state >= _CHUNK_STATES else "scan"


def _compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _check(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor | None, mode: str, cu_seqlens: Tensor | None
) -> None:
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; expected one of {', '.join(MODES)}")
    named = {"q": q, "k": k, "v": v, "a": a} | ({} if state is None else {"state": state})
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(f"{name} is of type {tensor.dtype}; expected floating point or complex numbers")
        if tensor.dim() != 4:
            wanted = "(B, H, d_qk, d_v)" if name == "state" else "(B, L, H, d)"
            raise ValueError(f"{name} is of shape {tuple(tensor.shape)}; expected {wanted}")
        if tensor.device != q.device:
            raise ValueError(sentence(name, kind_of(tensor), f"a tensor on {q.device}, as q"))
    steps = tuple(q.shape[:3])
    wanted_shapes = {"k": [(*steps, q.shape[3])], "a": [(*steps, 1), (*steps, q.shape[3])]}
    wanted_shapes["v"] = [(*steps, v.shape[3])]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *steps[:2])
    n_states = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    wanted_shapes["state"] = [(n_states, *q.shape[2:], v.shape[3])]
    for name, tensor in named.items():
        wanted_here = wanted_shapes.get(name, [tuple(tensor.shape)])
        if tuple(tensor.shape) not in wanted_here:
            expected = " or ".join(map(str, wanted_here))
            raise ValueError(f"{name} is of shape {tuple(tensor.shape)}; expected {expected}, as q is {tuple(q.shape)}")
