"""The linear recurrence as torch operators: the kernels, their shapes for tracing, and every kind of derivative.

    recurra::linear_scan            h_t = a_t h_{t-1} + b_t       tensors (B, L, D), h0 (B, D), one floating dtype
    recurra::linear_scan_backward   the gradients for a, b, h0

On the CPU they run Numba's kernels, or Triton's in its interpreter if backend is "triton"; on CUDA Triton's. They check
every tensor before they take an address. `differentiable_scan` wraps derivatives around them. It uses an
`autograd.Function` instead of `torch.library.custom_op`, because with the latter's `register_autograd`,
`torch.func.jvp` silently returns zeros.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recurra.checks import kind_of, require_layout, sentence
from recurra.kernels.flops import flop_formula, hand_over_formulas
from recurra.kernels.huge_pages import empty_result
from recurra.kernels.operators import (
    are_batched,
    gradients_are_differentiated,
    register_derivatives,
    with_known_signature,
)
from recurra.kernels.tensors import describe, require_one_device, span_of_job, with_neighbouring_channels

_COMPUTED = (torch.float32, torch.float64, torch.complex64, torch.complex128)

_library = torch.library.Library("recurra", "FRAGMENT")
_library.define("linear_scan(Tensor a, Tensor b, Tensor h0, bool reverse, str backend='auto') -> Tensor")
_library.define(
    "linear_scan_backward(Tensor dh, Tensor a, Tensor h, Tensor h0, bool reverse, str backend='auto') -> "
    "(Tensor, Tensor, Tensor)"
)


def _kernels(dtype: torch.dtype, row: int, batch: int) -> tuple[Any, int]:
    """Choose the kernels for rows of `row` floats, and the number of floats of each row that a job takes."""
    from recurra.scan.narrow_kernels import WIDEST_ROW, narrow_kernels, vector_width
    from recurra.scan.numba_kernels import scan_kernels

    number = "float64" if dtype in (torch.float64, torch.complex128) else "float32"
    if row <= WIDEST_ROW:
        return narrow_kernels(number, vector_width(row, dtype.is_complex), dtype.is_complex), row
    return scan_kernels(number, dtype.is_complex), span_of_job(row, batch)


def _check(name: str, first: Tensor, others: dict[str, Tensor], h0: Tensor) -> None:
    """Refuse what the kernels cannot take: all tensors are (B, L, D), h0 (B, D), of one type and on one device."""
    shape, dtype, device = first.shape, first.dtype, first.device
    if len(shape) != 3 or dtype not in _COMPUTED:
        raise ValueError(sentence(name, kind_of(first), "float32, float64, complex64 or complex128 (B, L, D)"))
    for other, tensor in others.items():
        require_layout(other, tensor, shape, dtype, device)
    require_layout("h0", h0, (shape[0], shape[2]), dtype, device)


def scan_into(h: Tensor, a: Tensor, b: Tensor, h0: Tensor, reverse: bool) -> None:
    """Run the forward kernel into `h` (B, L, D), which is contiguous.

    h can be a or b itself: the kernels read a number of either before they write its place. h0 can lie anywhere.

    Raises:
        ValueError: a tensor does not have b's shape, type and device, h is not contiguous, or h overlaps a or b in any
            other way.
    """
    _check("b", b, {"a": a, "h": h}, h0)
    if not h.is_contiguous() or h.is_conj() or h.is_neg():
        raise ValueError(sentence("h", f"a view with strides {h.stride()}", "a contiguous tensor"))
    if b.numel() == 0:
        return
    start, end = _stretch(h)
    for name, tensor in (("a", a), ("b", b)):
        if _overlaps(tensor, start, end) and not _is_same_memory(tensor, h):
            fitting = f"memory of its own, or exactly that of {name}"
            raise ValueError(sentence("out", f"memory that {name} overlaps", fitting))
    _scan_into(h, a, b, h0.clone() if _overlaps(h0, start, end) else h0, reverse)


def _stretch(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of the memory that a tensor reaches over, and the address after it."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size()


def _overlaps(tensor: Tensor, start: int, end: int) -> bool:
    first, last = _stretch(tensor)
    return first < end and start < last


def _is_same_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of one shape and type have every number in the same place."""
    strides = zip(x.shape, x.stride(), y.stride())
    same = x.data_ptr() == y.data_ptr() and all(n == 1 or one == other for n, one, other in strides)
    return same and not x.is_conj() and not x.is_neg()


def _scan_into(h: Tensor, a: Tensor, b: Tensor, h0: Tensor, reverse: bool) -> None:
    batch, length, channels = b.shape
    if b.numel() == 0:
        return
    a, b, h0 = (
        with_neighbouring_channels(a),
        with_neighbouring_channels(b),
        h0.resolve_conj().resolve_neg().contiguous(),
    )
    row = channels * (2 if b.is_complex() else 1)
    kernels, span = _kernels(b.dtype, row, batch)
    first, step = (length - 1, -1) if reverse else (0, 1)
    kernels.forward(
        *(describe(a), describe(b), h0.data_ptr(), describe(h), batch, length, row, span, first, step),
        jobs=batch * -(-row // span),
        work=batch * length * row,
    )


def _linear_scan(a: Tensor, b: Tensor, h0: Tensor, reverse: bool, backend: str = "auto") -> Tensor:
    _check("b", b, {"a": a}, h0)
    h = empty_result(b.shape, b)
    if b.numel() and (b.is_cuda or backend == "triton"):
        from recurra.scan import triton_kernels

        triton_kernels.scan_into(h, a, b, h0, reverse)
    else:
        _scan_into(h, a, b, h0, reverse)
    return h


def _linear_scan_backward(
    dh: Tensor, a: Tensor, h: Tensor, h0: Tensor, reverse: bool, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    _check("h", h, {"dh": dh, "a": a}, h0)
    da, db, dh0 = (empty_result(x.shape, x) for x in (h, h, h0))
    batch, length, channels = h.shape
    if h.numel() == 0:
        return da, db, dh0.zero_()
    if h.is_cuda or backend == "triton":
        from recurra.scan import triton_kernels

        triton_kernels.scan_back_into(da, db, dh0, dh, a, h, h0, reverse)
        return da, db, dh0
    dh, a, h = with_neighbouring_channels(dh), with_neighbouring_channels(a), h.resolve_conj().contiguous()
    h0 = h0.resolve_conj().resolve_neg().contiguous()
    row = channels * (2 if h.is_complex() else 1)
    kernels, span = _kernels(h.dtype, row, batch)
    last, step = (0, 1) if reverse else (length - 1, -1)
    kernels.backward(
        *(describe(dh), describe(a), describe(h), h0.data_ptr(), da.data_ptr(), db.data_ptr(), dh0.data_ptr()),
        *(batch, length, row, span, last, step),
        jobs=batch * -(-row // span),
        work=batch * length * row,
    )
    return da, db, dh0


for _device in ("CPU", "CUDA"):
    _library.impl("linear_scan", _linear_scan, _device)
    _library.impl("linear_scan_backward", _linear_scan_backward, _device)


@torch.library.register_fake("recurra::linear_scan")
def _linear_scan_fake(a: Tensor, b: Tensor, h0: Tensor, reverse: bool, backend: str = "auto") -> Tensor:
    require_one_device(b=b, a=a, h0=h0)
    return b.new_empty(b.shape)


@torch.library.register_fake("recurra::linear_scan_backward")
def _linear_scan_backward_fake(
    dh: Tensor, a: Tensor, h: Tensor, h0: Tensor, reverse: bool, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    require_one_device(h=h, dh=dh, a=a, h0=h0)
    return h.new_empty(h.shape), h.new_empty(h.shape), h0.new_empty(h0.shape)


@flop_formula(torch.ops.recurra.linear_scan)
def _linear_scan_flops(a_shape: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    # for real numbers: a formula sees only shapes, and a complex step costs 8
    return 2 * torch.Size(b_shape).numel()


@flop_formula(torch.ops.recurra.linear_scan_backward)
def _linear_scan_backward_flops(dh_shape: Any, *_: Any, **__: Any) -> int:
    return 3 * torch.Size(dh_shape).numel()


def previous_states(h: Tensor, h0: Tensor, reverse: bool) -> Tensor:
    """Return the state that enters each step: h shifted by one, with h0 first (last if `reverse`)."""
    entering = h0.unsqueeze(1)
    return torch.cat([h[:, 1:], entering], 1) if reverse else torch.cat([entering, h[:, :-1]], 1)


@with_known_signature
class TraceableLinearScan(torch.autograd.Function):
    """h = scan(a, b, h0) on (B, L, D) tensors; its gradients, first and higher, are a scan in the other direction."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, h0: Tensor, reverse: bool, backend: str) -> Tensor:
        return torch.ops.recurra.linear_scan(a, b, h0, reverse, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        a, _, h0, ctx.reverse, ctx.backend = inputs
        ctx.save_for_backward(a, h0, output)
        ctx.save_for_forward(a, h0, output)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        a, h0, h = ctx.saved_tensors
        if gradients_are_differentiated() or are_batched(dh):
            return *_differentiable_backward(dh, a, h, h0, ctx.reverse, ctx.backend), None, None
        return *torch.ops.recurra.linear_scan_backward(dh, a, h, h0, ctx.reverse, ctx.backend), None, None


class LinearScan(TraceableLinearScan):
    """The same with forward derivatives (a scan in the same direction) and vmap; Dynamo cannot trace a jvp rule."""

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
                drive = drive + a_tangent * previous_states(h, h0, ctx.reverse)
            entering = torch.zeros_like(h0) if h0_tangent is None else h0_tangent
            return LinearScan.apply(a, drive, entering, ctx.reverse, ctx.backend)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, a: Tensor, b: Tensor, h0: Tensor, reverse: bool, backend: str
    ) -> tuple[Tensor, int]:
        mapped = [
            x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip((a, b, h0), in_dims)
        ]
        h = LinearScan.apply(*(x.flatten(0, 1) for x in mapped), reverse, backend)
        return h.unflatten(0, (info.batch_size, -1)) if h.numel() else torch.zeros_like(mapped[1]), 0


def _recorded(a: Tensor, b: Tensor, h0: Tensor, reverse: bool, backend: str = "auto") -> Tensor:
    return TraceableLinearScan.apply(a, b, h0, reverse, backend)


register_derivatives(_library, "linear_scan", _recorded)
register_derivatives(_library, "linear_scan_backward")


def differentiable_scan(a: Tensor, b: Tensor, h0: Tensor, reverse: bool, backend: str) -> Tensor:
    """Run the kernels of `backend` with derivatives around them, in a form that the current tracer accepts."""
    hand_over_formulas()
    scan = TraceableLinearScan if torch.compiler.is_compiling() else LinearScan
    return scan.apply(a, b, h0, reverse, backend)


def _differentiable_backward(
    dh: Tensor, a: Tensor, h: Tensor, h0: Tensor, reverse: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = torch.zeros_like(a[:, :1])
    later_a = torch.cat([nothing, a[:, :-1]], 1) if reverse else torch.cat([a[:, 1:], nothing], 1)
    g = differentiable_scan(later_a.conj(), dh, torch.zeros_like(h0), not reverse, backend)
    first = -1 if reverse else 0
    return g * previous_states(h, h0, reverse).conj(), g, g[:, first] * a[:, first].conj()
