"""The front door of the linear recurrence h_t = a_t h_{t-1} + b_t."""

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from recurra.kernels.backends import choose_backend
from recurra.kernels.tensors import HALF
from recurra.lengths.packed import check_cu_seqlens, start_anew
from recurra.scan.operators import differentiable_scan, scan_into
from recurra.scan.reference import linear_scan_reference

_COMPUTED_AS_THEY_ARE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def linear_scan(
    a: Tensor,
    b: Shaped[Tensor, "B L *channels"],
    h0: Shaped[Tensor, "N *channels"] | None = None,
    *,
    reverse: bool = False,
    backend: str = "auto",
    out: Tensor | None = None,
    cu_seqlens: Int[Tensor, " borders"] | None = None,
) -> Shaped[Tensor, "B L *channels"]:
    """Compute h_t = a_t h_{t-1} + b_t along dimension 1 (GateLoop (7); notes, linear RNN).

    Args:
        a: the transitions, of any shape that broadcasts to b's: (B, L, *channels), (L, *channels), (*channels,) ...
        b: the inputs, (B, L, *channels).
        h0: the state before the first step (after the last one when `reverse`), (B, *channels); zeros when None.
        reverse: walk from the last step to the first: h_t = a_t h_{t+1} + b_t.
        backend: "reference" (plain torch, any device), "numba" (CPU), "triton" (CUDA; on the CPU only in Triton's
            interpreter, for tests), or "auto": the fastest that can run here. One asked for by name runs or raises.
        out: a tensor like the result to write it into, for the CPU kernel and where no gradient is asked for. Of a
            large result, page faults of new memory are most of the time; THP_MEM_ALLOC_ENABLE=1 makes them fewer. It
            may be a or b itself, and h0 may lie in it; it may not overlap a or b in another way.
        cu_seqlens: the borders of N sequences that lie end to end in b (1, T, *channels), for each of which the
            recurrence starts anew, from its own h0 (N, *channels): N + 1 ascending integers from 0 to T. It is still
            one scan, with transitions of 0 at the borders: no gradient crosses them, but 0 times NaN or infinity is
            NaN, which then spreads to the sequences behind. The states after the sequences are
            h[0, cu_seqlens[1:] - 1], where none is empty.

    Returns:
        h, (B, L, *channels), in the type that a, b and h0 promote to. float16 and bfloat16 are computed in float32.

    Every backend is differentiable in a, b and h0, as often as one likes. On the CPU kernel a real scan equals the
    reference bit for bit, and so does whatever it makes of NaN and infinity.

    Raises:
        TypeError: an argument is no tensor, or of an integer type.
        ValueError: shapes or devices do not fit, or the backend has no such name.
        RuntimeError: the backend asked for cannot run here.

    >>> linear_scan(torch.tensor([0.5]), torch.ones(1, 4, 1)).flatten()
    tensor([1.0000, 1.5000, 1.7500, 1.8750])
    """
    dtype = common_dtype(a, b, h0)
    check_shapes(a, b, h0, cu_seqlens)
    chosen = choose_backend(backend, b.device)
    computed = torch.float32 if dtype in HALF else dtype
    batch, length = b.shape[:2]
    if out is not None:
        _check_out(out, a, b, h0, dtype, chosen)
    a, b, h0 = a.to(computed), b.to(computed), None if h0 is None else h0.to(computed)
    if cu_seqlens is not None:
        a, b, h0 = *start_anew(a, b, h0, cu_seqlens, reverse), None
    h0 = b.new_zeros(b.shape[:1] + b.shape[2:]) if h0 is None else h0
    if b.numel() == 0:  # nothing to scan; the graph stays connected
        return (a * b + h0.unsqueeze(1)).to(dtype) if out is None else out
    flat_a = a.expand(b.shape).reshape(batch, length, -1)
    flat_b, flat_h0 = b.reshape(batch, length, -1), h0.reshape(batch, -1)
    if out is not None:
        scan_into(out.view(flat_b.shape), flat_a, flat_b, flat_h0, reverse)
        return out
    if chosen == "reference":
        h = linear_scan_reference(flat_a, flat_b, flat_h0, reverse)
    else:
        h = differentiable_scan(flat_a, flat_b, flat_h0, reverse, chosen)
    return h.reshape(b.shape).to(dtype)


def common_dtype(a: Tensor, b: Tensor, h0: Tensor | None) -> torch.dtype:
    """Give the type that the arguments of a scan promote to; TypeError or ValueError names one that does not fit."""
    named = {"a": a, "b": b} if h0 is None else {"a": a, "b": b, "h0": h0}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    for name, tensor in named.items():
        if tensor.dtype not in HALF + _COMPUTED_AS_THEY_ARE:
            raise TypeError(
                f"{name} is of type {tensor.dtype}; expected float16, bfloat16, float32, float64, complex64 or "
                f"complex128: convert it, for example {name}.float()"
            )
        if tensor.device != b.device:
            raise ValueError(f"{name} is on {tensor.device} and b on {b.device}; move them to one device")
    dtype = torch.promote_types(a.dtype, b.dtype)
    return dtype if h0 is None else torch.promote_types(dtype, h0.dtype)


def check_shapes(a: Tensor, b: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None = None) -> None:
    """Raise ValueError for shapes that do not make a scan, of one sequence a row or of packed ones."""
    if b.dim() < 2:
        raise ValueError(f"b is of shape {tuple(b.shape)}; expected (B, L, *channels)")
    shape = tuple(b.shape)
    fits = a.dim() <= b.dim() and all(n in (1, m) for n, m in zip(a.shape[::-1], shape[::-1]))
    if not fits:
        raise ValueError(
            f"a is of shape {tuple(a.shape)}; expected a shape that broadcasts to b's {shape}: each of its dimensions, "
            f"counted from the last, must be 1 or b's"
        )
    n_sequences = shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *shape[:2])
        n_sequences = len(cu_seqlens) - 1
    if h0 is not None and h0.shape != (n_sequences, *shape[2:]):
        expected = (n_sequences, *shape[2:])
        raise ValueError(f"h0 is of shape {tuple(h0.shape)}; expected {expected}: a state for every sequence")


def _check_out(out: Tensor, a: Tensor, b: Tensor, h0: Tensor | None, dtype: torch.dtype, backend: str) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (out, a, b, h0)):
        raise RuntimeError("out is not differentiable; leave it away, or call under torch.no_grad()")
    if backend != "numba":
        raise RuntimeError(f'out is written by the CPU kernel, and the backend here is "{backend}"; leave it away')
    fits = out.shape == b.shape and out.dtype == dtype and out.device == b.device
    if not fits or dtype in HALF or not out.is_contiguous() or out.is_conj() or out.is_neg():
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}; expected a contiguous tensor of shape "
            f"{tuple(b.shape)} and type {dtype} on {b.device} (float16 and bfloat16 cannot be written in place)"
        )
