"""The linear recurrence: the public function, and torch operators around its kernels with every kind of derivative.

The operators take tensors (B, L, D) and h0 (B, D) of one type, and check each before they take an address. On the CPU
they run Numba's kernels, or Triton's in its interpreter if backend is "triton"; on CUDA Triton's.
"""

import math
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from recurra.checks import kind_of, require_layout, require_tensor, sentence
from recurra.lengths import check_cu_seqlens, check_reset, cut_transitions, start_anew
from recurra.ops._operator import (
    HALF,
    Differentiable,
    Operator,
    addresses,
    describe,
    has_numbers,
    last_dim_contiguous,
    needs_gradient,
    require_layouts,
    span_of_job,
    transforms_are_active,
)
from recurra.ops._toolkit.backends import choose_backend
from recurra.ops._toolkit.memory import empty_result
from recurra.ops.scan.reference import linear_scan_reference

_COMPUTED = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_TAKEN = frozenset(HALF + _COMPUTED)


def _kernels(h: Tensor, half: torch.dtype | None = None) -> tuple[Any, tuple[int, ...], dict[str, int]]:
    """Choose the kernels for states (B, L, D), and inputs of type `half`, if given.

    Gives their sizes too, and their jobs, of `span` floats of each row.
    """
    batch, length, channels = h.shape
    row = 2 * channels if h.is_complex() else channels
    kernels, is_narrow = _kernels_for_rows(row, h.dtype, half)
    span = row if is_narrow else span_of_job(row, batch)
    return kernels, (batch, length, row, span), {"jobs": batch * -(-row // span), "work": batch * length * row}


@cache
def _kernels_for_rows(row: int, dtype: torch.dtype, half: torch.dtype | None) -> tuple[Any, bool]:
    """Return the kernels for rows of this many floats, and whether they take whole rows."""
    from recurra.ops.scan._cpu import WIDEST_ROW, half_kernels, narrow_kernels, scan_kernels, vector_width

    if half is not None:
        return half_kernels(str(half).removeprefix("torch.")), False
    number, is_complex = "float64" if dtype in (torch.float64, torch.complex128) else "float32", dtype.is_complex
    if row <= WIDEST_ROW:
        return narrow_kernels(number, vector_width(row, is_complex), is_complex), True
    return scan_kernels(number, is_complex), False


def _check(name: str, first: Tensor, others: dict[str, Tensor], h0: Tensor) -> None:
    """Refuse what the kernels cannot take: all tensors are (B, L, D), h0 (B, D), of one type and on one device."""
    shape, dtype, device = first.shape, first.dtype, first.device
    if len(shape) != 3 or dtype not in _COMPUTED:
        raise ValueError(sentence(name, kind_of(first), "float32, float64, complex64 or complex128 (B, L, D)"))
    for other, tensor in others.items():
        require_layout(other, tensor, shape, dtype, device)
    require_layout("h0", h0, (shape[0], shape[2]), dtype, device)


def _scan_in_place(h: Tensor, a: Tensor, b: Tensor, h0: Tensor, reverse: bool) -> None:
    """Run the forward kernel into `h` (B, L, D), which is contiguous.

    h can be a or b itself: the kernels read a number of either before they write its place. h0 can lie anywhere.
    """
    for name, tensor in (("a", a), ("b", b)):
        if _overlap(tensor, h) and not _is_same_memory(tensor, h):
            fitting = f"memory of its own, or exactly that of {name}"
            raise ValueError(sentence("out", f"memory that {name} overlaps", fitting))
    _scan_into(h, a, b, h0.clone() if _overlap(h0, h) else h0, reverse)


def _stretch(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of the memory that a tensor reaches over, and the address after it."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlap(x: Tensor, y: Tensor) -> bool:
    starts, ends = zip(_stretch(x), _stretch(y))
    return max(starts) < min(ends)


def _is_same_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of one shape and type have every number in the same place."""
    strides = zip(x.shape, x.stride(), y.stride())
    same = x.data_ptr() == y.data_ptr() and all(n == 1 or one == other for n, one, other in strides)
    return same and not x.is_conj() and not x.is_neg()


def _scan_into(h: Tensor, a: Tensor, b: Tensor, h0: Tensor, reverse: bool) -> None:
    if b.numel() == 0:
        return
    a, b, h0 = last_dim_contiguous(a), last_dim_contiguous(b), h0.contiguous()
    kernels, sizes, work = _kernels(h)
    first, step = (b.shape[1] - 1, -1) if reverse else (0, 1)
    kernels.forward(describe(a), describe(b), h0.data_ptr(), describe(h), *sizes, first, step, **work)


def _run(h: Tensor, a: Tensor, b: Tensor, h0: Tensor, reverse: bool, backend: str) -> None:
    if b.numel() and (b.is_cuda or backend == "triton"):
        from recurra.ops.scan import _triton as triton_kernels

        triton_kernels.scan_into(h, a, b, h0, reverse)
    else:
        _scan_into(h, a, b, h0, reverse)


def _run_back(results: tuple, dh: Tensor, a: Tensor, h: Tensor, h0: Tensor, reverse: bool, backend: str) -> None:
    da, db, dh0 = results
    if h.numel() == 0:
        dh0.zero_()
        return
    if h.is_cuda or backend == "triton":
        from recurra.ops.scan import _triton as triton_kernels

        triton_kernels.scan_backward_into(da, db, dh0, dh, a, h, h0, reverse)
        return
    dh, a, h, h0 = last_dim_contiguous(dh), last_dim_contiguous(a), h.contiguous(), h0.contiguous()
    kernels, sizes, work = _kernels(h)
    last, step = (0, 1) if reverse else (h.shape[1] - 1, -1)
    places = describe(dh), describe(a), describe(h), *addresses(h0, da, db, dh0)
    kernels.backward(*places, *sizes, last, step, **work)


# FLOPs are counted for real numbers: a formula sees only shapes, and a complex step costs 8.
_scan = Operator(
    "linear_scan(Tensor a, Tensor b, Tensor h0, bool reverse, str backend='auto') -> Tensor",
    check=lambda a, b, h0, *_: _check("b", b, {"a": a}, h0),
    allocate=lambda a, b, *_: empty_result(b),
    run=_run,
    flops=lambda a, b, *_: 2 * math.prod(b),
    devices=("CPU", "CUDA"),
)
_scan_back = Operator(
    "linear_scan_backward(Tensor dh, Tensor a, Tensor h, Tensor h0, bool reverse, str backend='auto') -> "
    "(Tensor, Tensor, Tensor)",
    check=lambda dh, a, h, h0, *_: _check("h", h, {"dh": dh, "a": a}, h0),
    allocate=lambda dh, a, h, h0, *_: (empty_result(h), empty_result(h), empty_result(h0)),
    run=_run_back,
    flops=lambda dh, *_: 3 * math.prod(dh),
    devices=("CPU", "CUDA"),
)


def previous_states(h: Tensor, h0: Tensor, reverse: bool) -> Tensor:
    """Return the state that enters each step: h shifted by one, with h0 first (last if `reverse`)."""
    entering = h0.unsqueeze(1)
    return torch.cat([h[:, 1:], entering], 1) if reverse else torch.cat([entering, h[:, :-1]], 1)


def _forward(keep: bool, a: Tensor, b: Tensor, h0: Tensor, reverse: bool, backend: str) -> tuple[tuple, tuple]:
    h = _scan.behind_door(a, b, h0, reverse, backend)
    return (h,), (a, h0, h)


def _backward(gradients: tuple, saved: tuple, needs: tuple, reverse: bool, backend: str) -> tuple:
    a, h0, h = saved
    return _scan_back(gradients[0], a, h, h0, reverse, backend)


def _differentiable_backward(
    gradients: tuple, saved: tuple, reverse: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients that can be differentiated again, by a scan backwards; the kernel's are `_run_back`."""
    (dh,), (a, h0, h) = gradients, saved
    _check("h", h, {"dh": dh, "a": a}, h0)  # hooks may have changed what was saved
    nothing = torch.zeros_like(a[:, :1])
    later_a = torch.cat([nothing, a[:, :-1]], 1) if reverse else torch.cat([a[:, 1:], nothing], 1)
    g = differentiable_scan(later_a.conj(), dh, torch.zeros_like(h0), not reverse, backend)
    first = -1 if reverse else 0
    return g * previous_states(h, h0, reverse).conj(), g, g[:, first] * a[:, first].conj()


class _TransformedScan(torch.autograd.Function):
    """The scan under torch.func: its forward derivatives are a scan, too, and so is a batch of scans."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, h0: Tensor, reverse: bool, backend: str) -> Tensor:
        return _scan(a, b, h0, reverse, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        a, _, h0, *ctx.options = inputs
        ctx.save_for_backward(a, h0, output)
        ctx.save_for_forward(a, h0, output)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        return *_differentiable_backward((dh,), ctx.saved_tensors, *ctx.options), None, None

    @staticmethod
    def jvp(
        ctx: Any, a_tangent: Tensor | None, b_tangent: Tensor | None, h0_tangent: Tensor | None, *_: None
    ) -> Tensor:
        a, h0, h = (forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors)
        # Inside a rule torch switches forward derivatives off, even those of a surrounding jvp, whose share of the
        # second derivative would silently be zero.
        with forward_ad._set_fwd_grad_enabled(True):
            drive = torch.zeros_like(h) if b_tangent is None else b_tangent
            if a_tangent is not None:
                drive = drive + a_tangent * previous_states(h, h0, ctx.options[0])
            entering = torch.zeros_like(h0) if h0_tangent is None else h0_tangent
            return _TransformedScan.apply(a, drive, entering, *ctx.options)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, a: Tensor, b: Tensor, h0: Tensor, reverse: bool, backend: str
    ) -> tuple[Tensor, int]:
        mapped = [
            x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip((a, b, h0), in_dims)
        ]
        h = _TransformedScan.apply(*(x.flatten(0, 1) for x in mapped), reverse, backend)
        return h.unflatten(0, (info.batch_size, -1)) if h.numel() else torch.zeros_like(mapped[1]), 0


_with_derivatives = Differentiable(
    _forward,
    _backward,
    n_inputs=3,
    reference=lambda a, b, h0, reverse, _: (linear_scan_reference(a, b, h0, reverse),),
    again=_differentiable_backward,
    transformed=lambda *arguments: (_TransformedScan.apply(*arguments),),
)


def differentiable_scan(a: Tensor, b: Tensor, h0: Tensor, reverse: bool, backend: str) -> Tensor:
    """Run the kernels of `backend` with derivatives of every kind around them."""
    return _with_derivatives(a, b, h0, reverse, backend)[0]


_scan.record = differentiable_scan


# Halves have no operator of their own: what is traced, watched or transformed is converted to float32 and back.


def _kernels_take_halves(a: Tensor, b: Tensor, h0: Tensor | None) -> bool:
    """Return whether kernels can read and write these, all float16 or all bfloat16, without a conversion.

    Narrow rows are converted, which takes less time than to compile kernels of every width for them. So are transitions
    that broadcast and need a gradient: it is summed before it is rounded.
    """
    if not has_numbers(a, b, h0) or transforms_are_active() or not b.is_cpu or not b.numel():
        return False
    from recurra.ops._toolkit.vectors import converts_float16
    from recurra.ops.scan._cpu import WIDEST_ROW

    if math.prod(b.shape[2:]) <= WIDEST_ROW or (not _alike(a, b) and needs_gradient(a)):
        return False
    return b.dtype == torch.bfloat16 or converts_float16()


def _halves_forward(keep: bool, a: Tensor, b: Tensor, h0: Tensor, reverse: bool) -> tuple[tuple, tuple]:
    """Return the rounded states, and for gradients those in float32, a second output that second derivatives use."""
    entering = h0.float().contiguous()
    rounded = empty_result(b)
    h = empty_result(b, torch.float32) if keep else torch.empty_like(entering).unsqueeze(1).expand(b.shape)
    kernels, sizes, work = _kernels(h, b.dtype)
    first, step = (b.shape[1] - 1, -1) if reverse else (0, 1)
    dense_a, dense_b = last_dim_contiguous(a), last_dim_contiguous(b)
    places = describe(dense_a), describe(dense_b), entering.data_ptr(), describe(h), describe(rounded)
    kernels.forward(*places, *sizes, first, step, **work)
    return (rounded, h) if keep else (rounded,), (a, h0, h)


def _halves_backward(gradients: tuple, saved: tuple, needs: tuple, reverse: bool) -> tuple[Tensor, ...]:
    (dh, d_wide), (a, h0, h) = gradients, saved
    if d_wide is not None or not has_numbers(dh, *saved):
        found = _backward(*_widened(gradients, saved), needs, reverse, "numba")
        return tuple(gradient.to(a.dtype) for gradient in found)
    require_layout("h", h, h.shape, torch.float32, dh.device)  # hooks may have changed what was saved
    require_layouts(dh.dtype, dh.device, dh=(dh, h.shape), a=(a, h.shape), h0=(h0, (h.shape[0], *h.shape[2:])))
    dh, a, entering = last_dim_contiguous(dh), last_dim_contiguous(a), h0.float().contiguous()
    da, db, dh0 = empty_result(h, a.dtype), empty_result(h, a.dtype), torch.empty_like(entering)
    kernels, sizes, work = _kernels(h, a.dtype)
    last, step = (0, 1) if reverse else (h.shape[1] - 1, -1)
    places = describe(dh), describe(a), describe(h), *addresses(entering, da, db, dh0)
    kernels.backward(*places, *sizes, last, step, **work)
    return da, db, dh0.to(a.dtype)


def _differentiable_halves_backward(gradients: tuple, saved: tuple, reverse: bool) -> tuple[Tensor, ...]:
    found = _differentiable_backward(*_widened(gradients, saved), reverse, "numba")
    return tuple(gradient.to(saved[0].dtype) for gradient in found)


def _widened(gradients: tuple, saved: tuple) -> tuple[tuple[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return what the backward pass in float32 takes, with the gradients of both outputs as one."""
    a, h0, h = saved
    given = [gradient.float() for gradient in gradients if gradient is not None]
    return (given[0] if len(given) == 1 else given[0] + given[1],), (a.float(), h0.float(), h)


_scan_halves = Differentiable(
    _halves_forward,
    _halves_backward,
    n_inputs=3,
    reference=lambda a, b, h0, reverse: (
        differentiable_scan(a.float(), b.float(), h0.float(), reverse, "numba").to(b.dtype),
    ),
    again=_differentiable_halves_backward,
)


def linear_scan(
    a: Tensor,
    b: Shaped[Tensor, "B L *channels"],
    h0: Shaped[Tensor, "N *channels"] | None = None,
    *,
    reverse: bool = False,
    backend: str = "auto",
    out: Tensor | None = None,
    cu_seqlens: Int[Tensor, " borders"] | None = None,
    reset: Bool[Tensor, "B L"] | None = None,
) -> Shaped[Tensor, "B L *channels"]:
    """Compute h_t = a_t h_{t-1} + b_t along dimension 1 (GateLoop (7); notes, linear RNN).

    Args:
        a: the transitions, of any shape that broadcasts to b's: (B, L, *channels), (L, *channels), (*channels,) ...
        b: the inputs, (B, L, *channels).
        h0: the state before the first step (after the last one if `reverse`), (B, *channels); zeros if None.
        reverse: run from the last step to the first: h_t = a_t h_{t+1} + b_t.
        backend: "reference" (plain torch, any device), "numba" (CPU), "triton" (CUDA; on the CPU only in Triton's
            interpreter, for tests), or "auto", the fastest that can run here. A backend named explicitly is used, or
            the call raises.
        out: an existing tensor of the result's shape and type to write into; only for the CPU kernel, and only if no
            gradient is needed. This avoids page faults in newly allocated memory, which can take most of the time for a
            large result (without `out`, there are fewer of them if the system provides huge pages). `out` can be a or b
            itself, and h0 can be part of it; it must not overlap a or b in any other way.
        cu_seqlens: the offsets of N packed sequences in b (1, T, *channels): N + 1 ascending integers from 0 to T. The
            recurrence starts again at each, from its own h0 (N, *channels). It is still one scan, with transitions of 0
            at the offsets: no gradient crosses them, but 0 times NaN or infinity is NaN, which spreads to the following
            sequences. The states after the sequences are h[0, cu_seqlens[1:] - 1] if none is empty.
        reset: True at the first step of each new sequence, which starts from zeros (in either direction, no state
            passes between this step and the one before). These transitions are 0 too, as with `cu_seqlens`.

    Returns:
        h, (B, L, *channels), in the type to which a, b and h0 promote. float16 and bfloat16 are computed in float32.

    Every backend can be differentiated with respect to a, b and h0 any number of times. On the CPU kernel a real scan
    equals the reference bit for bit, NaN and infinity included.

    Raises:
        TypeError: an argument is not a tensor, or has an integer type.
        ValueError: shapes or devices do not fit, `out` overlaps an input, or the backend does not exist.
        RuntimeError: the backend cannot run here, or `out` is given where it is not supported.

    >>> linear_scan(torch.tensor([0.5]), torch.ones(1, 4, 1)).flatten()
    tensor([1.0000, 1.5000, 1.7500, 1.8750])
    """
    dtype = common_dtype(a, b, h0)
    check_shapes(a, b, h0, cu_seqlens)
    if reset is not None:
        check_reset(b, reset, cu_seqlens)
    chosen = choose_backend(backend, b.device)
    in_halves = dtype in HALF and chosen == "numba" and _kernels_take_halves(a, b, h0)
    if h0 is not None and cu_seqlens is not None:  # h0 enters through b, which must not round it
        in_halves = False
    computed = torch.float32 if dtype in HALF and not in_halves else dtype
    if out is not None:
        _check_out(out, a, b, h0, dtype, chosen)
    if not a.dtype == b.dtype == computed:
        a, b = a.to(computed), b.to(computed)
    if h0 is not None and h0.dtype != computed:
        h0 = h0.to(computed)
    if cu_seqlens is not None:
        a, b, h0 = *start_anew(a, b, h0, cu_seqlens, reverse), None
    if reset is not None:
        a = cut_transitions(a, reset, b.dim(), reverse)
    h = _flattened(a, b, h0, reverse, chosen, out)
    return h.to(dtype) if dtype in HALF else h


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether the shapes are equal. Without the first question Python compares a's channels with b's batch.

    A trace in which the two happen to be equal would then take only batches of this size.
    """
    return a.dim() == b.dim() and a.shape == b.shape


def _flattened(a: Tensor, b: Tensor, h0: Tensor | None, reverse: bool, backend: str, out: Tensor | None) -> Tensor:
    """Run the scan with all channels as one dimension, into `out` if that is given."""
    if h0 is None:
        h0 = b.new_zeros(b.shape[0], *b.shape[2:])  # numbers: torch takes twice as long to read a torch.Size
    if b.numel() == 0:  # nothing to scan; the graph stays connected
        return a * b + h0.unsqueeze(1) if out is None else out
    flat_a, flat_b, flat_h0 = a if _alike(a, b) else a.expand_as(b), b, h0
    if b.dim() != 3:
        batch, length = b.shape[:2]
        flat_a, flat_b = (x.reshape(batch, length, -1) for x in (flat_a, b))
        flat_h0 = h0.reshape(batch, -1)
    if out is not None and not torch.compiler.is_compiling() and all(map(has_numbers, (out, a, b, h0))):
        _scan_in_place(out.view(flat_b.shape), flat_a, flat_b, flat_h0, reverse)
        increment_version(out)  # so that a graph that has saved it refuses to go on
        return out
    if backend == "reference":
        h = linear_scan_reference(flat_a, flat_b, flat_h0, reverse)
    elif b.dtype in HALF:
        h = _scan_halves(flat_a, flat_b, flat_h0, reverse)[0]
    else:
        h = differentiable_scan(flat_a, flat_b, flat_h0, reverse, backend)
    h = h if b.dim() == 3 else h.reshape(b.shape)
    return h if out is None else out.copy_(h)


def common_dtype(a: Tensor, b: Tensor, h0: Tensor | None) -> torch.dtype:
    """Return the type that the arguments of a scan promote to."""
    require_tensor("b", b)
    dtype, device = b.dtype, b.device
    for name, tensor in (("a", a), ("b", b)) if h0 is None else (("a", a), ("b", b), ("h0", h0)):
        if tensor is not b:
            require_tensor(name, tensor)
        if tensor.dtype not in _TAKEN:
            expected = "float16, bfloat16, float32, float64, complex64 or complex128"
            raise TypeError(sentence(name, kind_of(tensor), expected, f"convert it, for example {name}.float()"))
        if tensor.device != device:
            raise ValueError(sentence(name, kind_of(tensor), f"a tensor on {device}, as b"))
        if tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def check_shapes(a: Tensor, b: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None = None) -> None:
    """Refuse shapes that do not make a scan, of a batch or of packed sequences."""
    if b.dim() < 2:
        raise ValueError(sentence("b", kind_of(b), "(B, L, *channels)"))
    shape = tuple(b.shape)
    if not _alike(a, b) and (a.dim() > b.dim() or not all(n in (1, m) for n, m in zip(a.shape[::-1], shape[::-1]))):
        hint = "each of its dimensions, counted from the last, must be 1 or b's"
        raise ValueError(sentence("a", kind_of(a), f"a shape that broadcasts to b's {shape}", hint))
    n_sequences = shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *shape[:2])
        n_sequences = len(cu_seqlens) - 1
    if h0 is not None and h0.shape != (n_sequences, *shape[2:]):
        raise ValueError(sentence("h0", kind_of(h0), f"{(n_sequences, *shape[2:])}, a state for each sequence"))


def _check_out(out: Tensor, a: Tensor, b: Tensor, h0: Tensor | None, dtype: torch.dtype, backend: str) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (out, a, b, h0)):
        hint = "omit it or call under torch.no_grad()"
        raise RuntimeError(sentence("out", "given where a gradient is needed", "None", hint))
    if transforms_are_active():
        raise RuntimeError(sentence("out", "given under torch.func or forward derivatives", "None"))
    if backend != "numba":
        hint = "omit it, for only the CPU kernel writes into a given tensor"
        raise RuntimeError(sentence("out", f"given for the backend {backend!r}", "None", hint))
    if dtype in HALF:
        raise ValueError(sentence("out", kind_of(out), "None: float16 and bfloat16 cannot be written in place"))
    require_layout("out", out, tuple(b.shape), dtype, b.device)
    if not out.is_contiguous() or out.is_conj() or out.is_neg():
        raise ValueError(sentence("out", f"a view with strides {out.stride()}", "a contiguous tensor"))
