"""The max-headed GateLoop (d_h = 1) for real q, k, v: its two kernels as torch operators, and the reference.

Complex transitions and states are two planes (real, imaginary) of shape (B, L, D) and (B, D); the imaginary plane is
None if the recurrence is real. The operator returns the real part of y, which the layer keeps (GateLoop App. C), and
the states, from which the imaginary part follows. Like every operator here it checks all tensors before it takes an
address.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recurra.checks import kind_of, require_layout, sentence
from recurra.kernels.flops import flop_formula, hand_over_formulas
from recurra.kernels.operators import (
    are_batched,
    differentiable_gradients,
    register_derivatives,
    transforms_are_active,
    with_known_signature,
)
from recurra.kernels.tensors import describe, require_one_device, span_of_job, with_neighbouring_channels
from recurra.scan.operators import differentiable_scan
from recurra.scan.reference import linear_scan_reference

_NAMES = {part: (f"h_{part}", f"dh_{part}", f"dlast_{part}") for part in ("re", "im")}
_NUMBERS = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}

_library = torch.library.Library("recurra", "FRAGMENT")
_library.define(
    "gate_loop_fused(Tensor q, Tensor k, Tensor v, Tensor a_re, Tensor? a_im, Tensor x0_re, Tensor? x0_im, "
    "bool keep_states, str backend='auto') -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "gate_loop_fused_backward(Tensor? dy, Tensor? dh_re, Tensor? dh_im, Tensor? dlast_re, Tensor? dlast_im, Tensor q, "
    "Tensor k, Tensor v, Tensor a_re, Tensor? a_im, Tensor x0_re, Tensor? x0_im, Tensor h_re, Tensor h_im, "
    "str backend='auto') -> Tensor[]"
)


class Planes(NamedTuple):
    """A complex tensor as its real and imaginary parts; `im` is None for a real one."""

    re: Tensor
    im: Tensor | None


class FusedResult(NamedTuple):
    """What the fused operator returns: Re y (B, L, D), all states if they were kept, and the last state (B, D)."""

    y: Tensor
    states: Planes
    last: Planes


def fused_reference(q: Tensor, k: Tensor, v: Tensor, a: Planes, state: Planes) -> FusedResult:
    """Compute GateLoop (7)-(8) for d_h = 1 in plain torch: h_t = a_t h_{t-1} + k_t v_t, y_t = q_t Re h_t."""
    return _around_scan(lambda a, b, h0: linear_scan_reference(a, b, h0, reverse=False), q, k, v, a, state)


def _around_scan(scan: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, a: Planes, state: Planes) -> FusedResult:
    drive = k.to(a.re.dtype) * v.to(a.re.dtype)
    if a.im is None or state.im is None:
        h = scan(a.re, drive, state.re)
        return FusedResult((q * h).to(q.dtype), Planes(h, None), Planes(h[:, -1].clone(), None))
    a_complex = torch.complex(a.re, a.im)
    h = scan(a_complex, drive.to(a_complex.dtype), torch.complex(state.re, state.im))
    return FusedResult((q * h.real).to(q.dtype), Planes(h.real, h.imag), Planes(h.real[:, -1], h.imag[:, -1]))


def fused(
    q: Tensor, k: Tensor, v: Tensor, a: Planes, state: Planes, *, backend: str, keep_states: bool = False
) -> FusedResult:
    """Run the operator on the backend "numba", "triton" or "reference".

    Under torch.func and forward derivatives it is the scan of that backend, which has a rule for each of them.

    Args:
        q, k, v: (B, L, D), one real type among bfloat16, float32 and float64; L at least 1.
        a: the transitions, planes of (B, L, D), float64 for float64 inputs and float32 for the others.
        state: the state that enters, planes of (B, D) of a's type; one plane or both, like a.
        backend: "numba", "triton" or "reference".
        keep_states: return all states. Otherwise `states` holds only the last step if no gradient is recorded.

    Raises:
        ValueError: from the kernels, if a tensor does not fit.
    """
    if backend == "reference":
        return fused_reference(q, k, v, a, state)
    if transforms_are_active():
        return _around_scan(lambda a, b, h0: differentiable_scan(a, b, h0, False, backend), q, k, v, a, state)
    hand_over_formulas()
    inputs = (q, k, v, a.re, a.im, state.re, state.im)
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    y, h_re, h_im, last_re, last_im = _Fused.apply(*inputs, keep_states or records, backend)
    if a.im is None:
        return FusedResult(y, Planes(h_re, None), Planes(last_re, None))
    return FusedResult(y, Planes(h_re, h_im), Planes(last_re, last_im))


def _launch(q: Tensor, plane: Tensor, is_complex: bool) -> Any:
    from recurra.gateloop.numba_kernels import fused_kernels

    return fused_kernels(_NUMBERS[q.dtype], _NUMBERS[plane.dtype], is_complex)


def _size(q: Tensor) -> tuple[tuple[int, int, int, int], dict[str, int]]:
    batch, length, row = q.shape
    span = span_of_job(row, batch)
    return (batch, length, row, span), {"jobs": batch * -(-row // span), "work": batch * length * row}


def _check(
    q: Tensor, k: Tensor, v: Tensor, a_re: Tensor, a_im: Tensor | None, x0_re: Tensor, x0_im: Tensor | None
) -> None:
    """Refuse what the kernels cannot take; `fused` says what they can."""
    shape, dtype, device = q.shape, q.dtype, q.device
    if len(shape) != 3 or not shape[1] or dtype not in _NUMBERS:
        raise ValueError(sentence("q", kind_of(q), "bfloat16, float32 or float64 (B, L, D), L at least 1"))
    if (a_im is None) != (x0_im is None):
        raise ValueError(sentence("x0_im", kind_of(x0_im), "a plane if a_im is one, and None if it is None"))
    state, plane = (shape[0], shape[2]), torch.float64 if dtype == torch.float64 else torch.float32
    require_layout("k", k, shape, dtype, device)
    require_layout("v", v, shape, dtype, device)
    require_layout("a_re", a_re, shape, plane, device)
    require_layout("x0_re", x0_re, state, plane, device)
    if a_im is not None and x0_im is not None:
        require_layout("a_im", a_im, shape, plane, device)
        require_layout("x0_im", x0_im, state, plane, device)


def _check_backward(
    q: Tensor, a: Tensor, h: Tensor, dy: Tensor | None, dh: Tensor | None, dlast: Tensor | None, part: str
) -> None:
    """Refuse states and gradients that do not fit the inputs, for the real or the imaginary plane."""
    shape, device, plane = q.shape, q.device, a.dtype
    if dy is not None:
        require_layout("dy", dy, shape, q.dtype, device)
    require_layout(_NAMES[part][0], h, shape, plane, device)
    if dh is not None:
        require_layout(_NAMES[part][1], dh, shape, plane, device)
    if dlast is not None:
        require_layout(_NAMES[part][2], dlast, (shape[0], shape[2]), plane, device)


def _fused_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    x0_re: Tensor,
    x0_im: Tensor | None,
    keep: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, a_re, a_im, x0_re, x0_im)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    states = q.shape if keep else (q.shape[0], 1, q.shape[2])
    h_re = torch.empty(states, dtype=a_re.dtype, device=q.device)
    h_im = torch.empty(states if a_im is not None else 0, dtype=a_re.dtype, device=q.device)
    if q.numel() == 0:
        return y, h_re, h_im
    q, k, v, a_re = (with_neighbouring_channels(x) for x in (q, k, v, a_re))
    if a_im is not None and x0_im is not None:
        a_im, x0_im = with_neighbouring_channels(a_im), x0_im.contiguous()
    x0_re = x0_re.contiguous()
    if q.is_cuda or backend == "triton":
        from recurra.gateloop import triton_kernels

        triton_kernels.forward_into(y, h_re, h_im, q, k, v, a_re, a_im, x0_re, x0_im)
        return y, h_re, h_im
    h_shown = h_re.expand(q.shape)
    sizes, work = _size(q)
    kernel = _launch(q, a_re, a_im is not None).forward
    if a_im is None or x0_im is None:
        tensors = (*map(describe, (q, k, v, a_re)), x0_re.data_ptr(), describe(y), describe(h_shown))
    else:
        entering = x0_re.data_ptr(), x0_im.data_ptr()
        tensors = (
            *map(describe, (q, k, v, a_re, a_im)),
            *entering,
            *map(describe, (y, h_shown, h_im.expand(q.shape))),
        )
    kernel(*tensors, *sizes, **work)
    return y, h_re, h_im


def _fused_backward(
    dy: Tensor | None,
    dh_re: Tensor | None,
    dh_im: Tensor | None,
    dlast_re: Tensor | None,
    dlast_im: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    x0_re: Tensor,
    x0_im: Tensor | None,
    h_re: Tensor,
    h_im: Tensor,
    backend: str = "auto",
) -> list[Tensor]:
    _check(q, k, v, a_re, a_im, x0_re, x0_im)
    _check_backward(q, a_re, h_re, dy, dh_re, dlast_re, "re")
    if a_im is not None:
        _check_backward(q, a_im, h_im, None, dh_im, dlast_im, "im")
    elif dh_im is not None or dlast_im is not None:
        raise ValueError(sentence("dh_im" if dlast_im is None else "dlast_im", "a tensor", "None, as a_im is None"))
    h_re, h_im = h_re.contiguous(), h_im.contiguous()
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    da_re, dx0_re = torch.empty(q.shape, dtype=a_re.dtype, device=q.device), _carry(dlast_re, x0_re)
    gradients = [dq, dk, dv, da_re, dx0_re]
    if a_im is not None and x0_im is not None:
        gradients = [dq, dk, dv, da_re, torch.empty_like(da_re), dx0_re, _carry(dlast_im, x0_im)]
    if q.numel() == 0:
        return gradients
    nothing = torch.zeros(1, 1, q.shape[2], dtype=a_re.dtype, device=q.device)
    dy = torch.zeros(1, 1, q.shape[2], dtype=q.dtype, device=q.device).expand(q.shape) if dy is None else dy
    dh_re = nothing.expand(q.shape) if dh_re is None else dh_re
    dy, q, k, v, a_re, dh_re = (with_neighbouring_channels(x) for x in (dy, q, k, v, a_re, dh_re))
    x0_re = x0_re.contiguous()
    if a_im is not None and x0_im is not None:
        dh_im = nothing.expand(q.shape) if dh_im is None else dh_im
        a_im, dh_im, x0_im = with_neighbouring_channels(a_im), with_neighbouring_channels(dh_im), x0_im.contiguous()
    if q.is_cuda or backend == "triton":
        from recurra.gateloop import triton_kernels

        triton_kernels.backward_into(gradients, dy, q, k, v, a_re, a_im, h_re, h_im, x0_re, x0_im, dh_re, dh_im)
        return gradients
    sizes, work = _size(q)
    kernel = _launch(q, a_re, a_im is not None).backward
    if a_im is None or x0_im is None or dh_im is None:
        inputs = (*map(describe, (dy, q, k, v, a_re, h_re)), x0_re.data_ptr(), describe(dh_re))
        outputs = (*map(describe, gradients[:4]), dx0_re.data_ptr())
    else:
        entering = x0_re.data_ptr(), x0_im.data_ptr()
        inputs = (*map(describe, (dy, q, k, v, a_re, a_im, h_re, h_im)), *entering, *map(describe, (dh_re, dh_im)))
        outputs = (*map(describe, gradients[:5]), gradients[5].data_ptr(), gradients[6].data_ptr())
    kernel(*inputs, *outputs, *sizes, **work)
    return gradients


def _carry(dlast: Tensor | None, x0: Tensor) -> Tensor:
    carry = torch.zeros(x0.shape, dtype=x0.dtype, device=x0.device)
    return carry if dlast is None else carry.copy_(dlast)


for _device in ("CPU", "CUDA"):
    _library.impl("gate_loop_fused", _fused_forward, _device)
    _library.impl("gate_loop_fused_backward", _fused_backward, _device)


@torch.library.register_fake("recurra::gate_loop_fused")
def _fused_fake(q, k, v, a_re, a_im, x0_re, x0_im, keep, backend="auto"):  # type: ignore[no-untyped-def]
    require_one_device(q=q, k=k, v=v, a_re=a_re, a_im=a_im, x0_re=x0_re, x0_im=x0_im)
    states = q.shape if keep else (q.shape[0], 1, q.shape[2])
    return q.new_empty(q.shape), a_re.new_empty(states), a_re.new_empty(states if a_im is not None else 0)


@torch.library.register_fake("recurra::gate_loop_fused_backward")
def _fused_backward_fake(  # type: ignore[no-untyped-def]
    dy, dh_re, dh_im, dlast_re, dlast_im, q, k, v, a_re, a_im, x0_re, x0_im, h_re, h_im, backend="auto"
):
    require_one_device(q=q, k=k, v=v, a_re=a_re, a_im=a_im, x0_re=x0_re, x0_im=x0_im, h_re=h_re, h_im=h_im)
    require_one_device(q=q, dy=dy, dh_re=dh_re, dh_im=dh_im, dlast_re=dlast_re, dlast_im=dlast_im)
    gradients = [q, k, v, a_re, x0_re] if a_im is None else [q, k, v, a_re, a_im, x0_re, x0_im]
    return [x.new_empty(x.shape) for x in gradients]


@flop_formula(torch.ops.recurra.gate_loop_fused)
def _fused_flops(q_shape, k_shape, v_shape, a_re_shape, a_im_shape, *_, **__) -> int:  # type: ignore[no-untyped-def]
    return torch.Size(q_shape).numel() * (9 if a_im_shape is not None else 4)


@flop_formula(torch.ops.recurra.gate_loop_fused_backward)
def _fused_backward_flops(dy, dh_re, dh_im, dl_re, dl_im, q_shape, k, v, a_re, a_im, *_, **__) -> int:  # type: ignore[no-untyped-def]
    return torch.Size(q_shape).numel() * (19 if a_im is not None else 8)


@with_known_signature
class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, a_re, a_im, x0_re, x0_im, keep, backend):  # type: ignore[no-untyped-def]
        y, h_re, h_im = torch.ops.recurra.gate_loop_fused(q, k, v, a_re, a_im, x0_re, x0_im, keep, backend)
        last_im = h_im[:, -1].clone() if a_im is not None else h_im.clone()
        return y, h_re, h_im, h_re[:, -1].clone(), last_im

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)
        ctx.backend = inputs[8]
        ctx.save_for_backward(*inputs[:7], output[1], output[2])

    @staticmethod
    def backward(ctx: Any, dy, dh_re, dh_im, dlast_re, dlast_im):  # type: ignore[no-untyped-def]
        *inputs, h_re, h_im = ctx.saved_tensors
        is_complex = inputs[4] is not None
        if not is_complex:
            dh_im = dlast_im = None
        # gradients that will be differentiated again, or a batch of them
        if torch.is_grad_enabled() or are_batched(dy, dh_re, dh_im, dlast_re, dlast_im):
            gradients = (dy, dh_re, dh_im, dlast_re, dlast_im)
            return *differentiable_gradients(_reference_outputs, inputs, gradients), None, None
        gradients = torch.ops.recurra.gate_loop_fused_backward(
            dy, dh_re, dh_im, dlast_re, dlast_im, *inputs, h_re, h_im, ctx.backend
        )
        if is_complex:
            return *gradients, None, None
        dq, dk, dv, da, dx0 = gradients
        return dq, dk, dv, da, None, dx0, None, None, None


def _recorded(q, k, v, a_re, a_im, x0_re, x0_im, keep, backend="auto"):  # type: ignore[no-untyped-def]
    # the gradient needs all states, whether the caller does or not
    y, h_re, h_im, _, _ = _Fused.apply(q, k, v, a_re, a_im, x0_re, x0_im, True, backend)
    if keep:
        return y, h_re, h_im
    return y, h_re[:, -1:], h_im if a_im is None else h_im[:, -1:]


register_derivatives(_library, "gate_loop_fused", _recorded)
register_derivatives(_library, "gate_loop_fused_backward")


def _reference_outputs(q, k, v, a_re, a_im, x0_re, x0_im) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
    result = fused_reference(q, k, v, Planes(a_re, a_im), Planes(x0_re, x0_im))
    return result.y, *result.states, *result.last
