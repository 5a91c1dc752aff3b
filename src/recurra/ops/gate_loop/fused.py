"""The max-headed GateLoop (d_h = 1) for real q, k and v as torch operators, and its transition from magnitude and phase
(GateLoop (25)).
"""

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.checks import kind_of, sentence
from recurra.ops._operator import (
    Differentiable,
    Operator,
    addresses,
    describe,
    has_numbers,
    keeping,
    require_layouts,
    span_of_job,
    transforms_are_active,
)
from recurra.ops._toolkit.memory import empty_result, in_huge_pages
from recurra.ops.scan.operator import differentiable_scan
from recurra.ops.scan.reference import linear_scan_reference

if TYPE_CHECKING:
    from recurra.ops._toolkit.launch import KernelPair

# Complex transitions and states are two planes (real, imaginary) of shape (B, L, D) and (B, D); the imaginary plane
# is None if the recurrence is real. The operator returns the real part of y, which the layer keeps (GateLoop App. C),
# and the states, from which the imaginary part follows.


_NUMBERS = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


class Planes(NamedTuple):
    """A complex tensor as its real and imaginary parts; `im` is None for a real one."""

    re: Tensor
    im: Tensor | None


class _FusedResult(NamedTuple):
    """What the fused operator returns: Re y (B, L, D), all states if they were kept, and the last state (B, D)."""

    y: Tensor
    states: Planes
    last: Planes


def _fused_reference(q: Tensor, k: Tensor, v: Tensor, a: Planes, state: Planes) -> _FusedResult:
    """Compute GateLoop (7)-(8) for d_h = 1 in plain torch: h_t = a_t h_{t-1} + k_t v_t, y_t = q_t Re h_t."""
    return _around_scan(lambda a, b, h0: linear_scan_reference(a, b, h0, reverse=False), q, k, v, a, state)


def _around_scan(
    scan: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, a: Planes, state: Planes
) -> _FusedResult:
    drive = k.to(a.re.dtype) * v.to(a.re.dtype)
    if a.im is None or state.im is None:
        h = scan(a.re, drive, state.re)
        return _FusedResult((q * h).to(q.dtype), Planes(h, None), Planes(h[:, -1].clone(), None))
    a_complex = torch.complex(a.re, a.im)
    h = scan(a_complex, drive.to(a_complex.dtype), torch.complex(state.re, state.im))
    return _FusedResult((q * h.real).to(q.dtype), Planes(h.real, h.imag), Planes(h.real[:, -1], h.imag[:, -1]))


def fused(
    q: Tensor, k: Tensor, v: Tensor, a: Planes, state: Planes, *, backend: str, keep_states: bool = False
) -> _FusedResult:
    """Run the operator on the backend "numba", "triton" or "reference".

    Under torch.func and forward derivatives it is the scan of that backend, which has a rule for each of them.

    Args:
        q, k, v: (B, L, D), one real type among bfloat16, float32 and float64; L at least 1. If `takes_heads`, all
            tensors can have the shapes of `gate_loop` for heads of one channel: (B, L, D, 1), and states (B, D, 1, 1).
        a: the transitions, planes of (B, L, D), float64 for float64 inputs and float32 for the others.
        state: the state that enters, planes of (B, D) of a's type; one plane or both, like a.
        backend: "numba", "triton" or "reference".
        keep_states: return all states. Otherwise `states` holds only the last step if no gradient is recorded.
    """
    if backend == "reference":
        return _fused_reference(q, k, v, a, state)
    y, h_re, h_im, last_re, last_im = _fused(q, k, v, *a, *state, keep_states, backend)
    if a.im is None:
        return _FusedResult(y, Planes(h_re, None), Planes(last_re, None))
    return _FusedResult(y, Planes(h_re, h_im), Planes(last_re, last_im))


def takes_heads(backend: str, *tensors: Tensor | None) -> bool:
    """Return whether `fused` takes tensors with a last dimension of 1: traces and rules for torch.func do not."""
    return backend == "numba" and has_numbers(*tensors) and not transforms_are_active()


def heads_without_gradient(q: Tensor, k: Tensor, v: Tensor, a: Planes, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run `fused` where `takes_heads` and nobody asks for gradients or all states, with little more than the kernel.

    Args:
        q, k, v, a: as for `fused`, (B, L, D, 1).
        state: (B, D, 1, 1), complex if a is.

    Returns:
        Re y (B, L, D, 1) and the last state, of the shape and type of `state`.
    """
    batch, _, row, _ = q.shape
    kernels, take_apart, join = _launch(q.dtype, a.re.dtype, a.im is not None)
    y, last, state = empty_result(q), state.new_empty(batch, row, 1, 1), state.contiguous()
    if a.im is None:
        x_re, x_im, h_re, h_im = (state.data_ptr(), state.data_ptr(), last.data_ptr(), last.data_ptr())
    else:
        planes, size = a.re.new_empty(4, batch * row), batch * row * a.re.element_size()
        first = planes.data_ptr()
        x_re, x_im, h_re, h_im = (first + plane * size for plane in range(4))
        take_apart(state.data_ptr(), x_re, x_im, batch * row)
    _walk(kernels, q, k, v, *a, x_re, x_im, y, (h_re, row, 0), (h_im, row, 0))
    if a.im is not None:
        join(last.data_ptr(), h_re, h_im, batch * row)
    return y, last


@cache
def _launch(number: torch.dtype, plane: torch.dtype, is_complex: bool) -> "tuple[KernelPair, Callable, Callable]":
    """The kernels, and the functions that take complex states apart and join them."""
    from recurra.ops.gate_loop._cpu import fused_kernels, plane_kernels

    return fused_kernels(_NUMBERS[number], _NUMBERS[plane], is_complex), *plane_kernels(_NUMBERS[plane])


def _size(q: Tensor) -> tuple[tuple[int, int, int, int], dict[str, int]]:
    batch, length, row, *_ = q.shape
    span = span_of_job(row, batch)
    return (batch, length, row, span), {"jobs": batch * -(-row // span), "work": batch * length * row}


def _check(q, k, v, a_re, a_im, x0_re, x0_im, keep=False, backend="auto"):  # type: ignore[no-untyped-def]
    """Refuse what the kernels cannot take; `fused` says what they can."""
    shape, dtype, device = q.shape, q.dtype, q.device
    is_wide = len(shape) == 4 and shape[3] == 1 and not (q.is_cuda or backend == "triton")
    if not (len(shape) == 3 or is_wide) or not shape[1] or dtype not in _NUMBERS:
        raise ValueError(sentence("q", kind_of(q), "bfloat16, float32 or float64 (B, L, D), L at least 1"))
    if (a_im is None) != (x0_im is None):
        raise ValueError(sentence("x0_im", kind_of(x0_im), "a plane if a_im is one, and None if it is None"))
    state = (shape[0], shape[2], 1, 1) if is_wide else (shape[0], shape[2])
    plane = torch.float64 if dtype == torch.float64 else torch.float32
    require_layouts(dtype, device, k=(k, shape), v=(v, shape))
    of_state = {"x0_re": (x0_re, state), "x0_im": (x0_im, state)}
    require_layouts(plane, device, a_re=(a_re, shape), a_im=(a_im, shape), **of_state)


def _check_back(  # type: ignore[no-untyped-def]
    dy, dh_re, dh_im, dlast_re, dlast_im, q, k, v, a_re, a_im, x0_re, x0_im, h_re, h_im, backend
):
    _check(q, k, v, a_re, a_im, x0_re, x0_im)
    shape, state = q.shape, x0_re.shape
    require_layouts(q.dtype, q.device, dy=(dy, shape))
    states = {"h_re": (h_re, shape), "h_im": (None if a_im is None else h_im, shape)}
    last = {"dlast_re": (dlast_re, state), "dlast_im": (dlast_im, state)}
    require_layouts(a_re.dtype, q.device, **states, dh_re=(dh_re, shape), dh_im=(dh_im, shape), **last)
    if a_im is None and (dh_im is not None or dlast_im is not None):
        raise ValueError(sentence("dh_im" if dlast_im is None else "dlast_im", "a tensor", "None, as a_im is None"))


def _allocate(q, k, v, a_re, a_im, x0_re, x0_im, keep, backend):  # type: ignore[no-untyped-def]
    batch, length, *row = q.shape
    states = batch, length if keep else 1, *row  # numbers: torch takes twice as long to read a torch.Size
    planes = a_re.new_empty(*states), a_re.new_empty(*states if a_im is not None else (0,))
    return in_huge_pages(q.new_empty(batch, length, *row)), *map(in_huge_pages, planes)


def _in_rows(x: Tensor) -> Tensor:
    """Return x (B, L, D) or (B, L, D, 1) with its channels next to each other."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _describe_states(h: Tensor, q: Tensor) -> tuple[int, int, int]:
    """Describe the states of all steps, or of the last alone, into whose place all are written."""
    (_, length, row, *_), n_kept = q.shape, h.shape[1]
    return h.data_ptr(), n_kept * row, row if n_kept == length else 0


def _run(results, q, k, v, a_re, a_im, x0_re, x0_im, keep, backend):  # type: ignore[no-untyped-def]
    y, h_re, h_im = results
    if q.numel() == 0:
        return
    x0_re, x0_im = x0_re.contiguous(), None if x0_im is None else x0_im.contiguous()
    if q.is_cuda or backend == "triton":
        from recurra.ops.gate_loop import _triton as triton_kernels

        q, k, v, a_re, a_im = (x if x is None else _in_rows(x) for x in (q, k, v, a_re, a_im))
        triton_kernels.forward_into(y, h_re, h_im, q, k, v, a_re, a_im, x0_re, x0_im)
        return
    kernels, *_ = _launch(q.dtype, a_re.dtype, a_im is not None)
    x_re = x_im = x0_re.data_ptr()
    of_re = of_im = _describe_states(h_re, q)
    if a_im is not None:
        x_im, of_im = x0_im.data_ptr(), _describe_states(h_im, q)
    _walk(kernels, q, k, v, a_re, a_im, x_re, x_im, y, of_re, of_im)


def _walk(kernels, q, k, v, a_re, a_im, x_re, x_im, y, h_re, h_im):  # type: ignore[no-untyped-def]
    """Run the forward kernel; the states are described already."""
    q, k, v, a_re = _in_rows(q), _in_rows(k), _in_rows(v), _in_rows(a_re)
    of_re = of_im = describe(a_re)
    if a_im is not None:
        a_im = _in_rows(a_im)
        of_im = describe(a_im)
    sizes, work = _size(q)
    kernels.forward(
        describe(q), describe(k), describe(v), of_re, of_im, x_re, x_im, describe(y), h_re, h_im, *sizes, **work
    )


def _allocate_back(  # type: ignore[no-untyped-def]
    dy, dh_re, dh_im, dlast_re, dlast_im, q, k, v, a_re, a_im, x0_re, x0_im, h_re, h_im, backend
):
    inputs = [q, k, v, a_re, x0_re] if a_im is None else [q, k, v, a_re, a_im, x0_re, x0_im]
    return [empty_result(x) for x in inputs]


def _run_back(  # type: ignore[no-untyped-def]
    gradients, dy, dh_re, dh_im, dlast_re, dlast_im, q, k, v, a_re, a_im, x0_re, x0_im, h_re, h_im, backend
):
    planes = 1 if a_im is None else 2
    carries = gradients[-planes:]
    for carry, dlast in zip(carries, (dlast_re, dlast_im)):
        carry.zero_() if dlast is None else carry.copy_(dlast)
    if q.numel() == 0:
        return
    dh = [a_re.new_zeros(1, 1, *q.shape[2:]).expand_as(q) if x is None else x for x in (dh_re, dh_im)[:planes]]
    dy = q.new_zeros(1, 1, *q.shape[2:]).expand_as(q) if dy is None else dy
    q, k, v, dy = map(_in_rows, (q, k, v, dy))
    gates = [_in_rows(x) for x in (a_re, a_im)[:planes]]
    dh = [_in_rows(x) for x in dh]
    entering = [x.contiguous() for x in (x0_re, x0_im)[:planes]]
    states = [h_re.contiguous(), h_im.contiguous()]
    if q.is_cuda or backend == "triton":
        from recurra.ops.gate_loop import _triton as triton_kernels

        (a_re, a_im), (x0_re, x0_im), (dh_re, dh_im) = ((*x, None)[:2] for x in (gates, entering, dh))
        h_re, h_im = states
        triton_kernels.backward_into(gradients, dy, q, k, v, a_re, a_im, h_re, h_im, x0_re, x0_im, dh_re, dh_im)
        return
    (sizes, work), both = _size(q), 2 // planes
    of_gates, of_states, of_dh, of_d_gates = (
        [describe(x) for x in plane] * both for plane in (gates, states[:planes], dh, gradients[3:-planes])
    )
    inputs = (*map(describe, (dy, q, k, v)), *of_gates, *of_states, *addresses(*entering) * both, *of_dh)
    outputs = (*map(describe, gradients[:3]), *of_d_gates, *addresses(*carries) * both)
    _launch(q.dtype, a_re.dtype, a_im is not None)[0].backward(*inputs, *outputs, *sizes, **work)


_operator = Operator(
    "gate_loop_fused(Tensor q, Tensor k, Tensor v, Tensor a_re, Tensor? a_im, Tensor x0_re, Tensor? x0_im, "
    "bool keep_states, str backend='auto') -> (Tensor, Tensor, Tensor)",
    check=_check,
    allocate=_allocate,
    run=_run,
    flops=lambda q, k, v, a_re, a_im, *_: math.prod(q) * (4 if a_im is None else 9),
    devices=("CPU", "CUDA"),
)
_back = Operator(
    "gate_loop_fused_backward(Tensor? dy, Tensor? dh_re, Tensor? dh_im, Tensor? dlast_re, Tensor? dlast_im, Tensor q, "
    "Tensor k, Tensor v, Tensor a_re, Tensor? a_im, Tensor x0_re, Tensor? x0_im, Tensor h_re, Tensor h_im, "
    "str backend='auto') -> Tensor[]",
    check=_check_back,
    allocate=_allocate_back,
    run=_run_back,
    flops=lambda dy, dh_re, dh_im, dl_re, dl_im, q, k, v, a_re, a_im, *_: math.prod(q) * (8 if a_im is None else 19),
    devices=("CPU", "CUDA"),
)


def _forward(keep, *arguments):  # type: ignore[no-untyped-def]
    *inputs, keep_states, backend = arguments
    y, h_re, h_im = _operator.behind_door(*inputs, keep or keep_states, backend)
    last_re = _last(h_re, inputs[5])
    last_im = h_im.clone() if inputs[4] is None else _last(h_im, inputs[6])
    return (y, h_re, h_im, last_re, last_im), (*inputs, h_re, h_im)


def _last(h: Tensor, h0: Tensor) -> Tensor:
    """Return the state after the last step in memory of its own, of the shape of the first."""
    last = h[:, -1].clone()
    return last if last.dim() == h0.dim() else last.unsqueeze(-1)


def _backward(gradients, saved, needs, keep_states, backend):  # type: ignore[no-untyped-def]
    if saved[4] is not None:
        return _back(*gradients, *saved, backend)
    dy, dh_re, _, dlast_re, _ = gradients
    dq, dk, dv, da, dx0 = _back(dy, dh_re, None, dlast_re, None, *saved, backend)
    return dq, dk, dv, da, None, dx0, None


def _reference(q, k, v, a_re, a_im, x0_re, x0_im, *options):  # type: ignore[no-untyped-def]
    is_wide = x0_re.dim() == q.dim()
    h0 = [x.squeeze(-1) if is_wide and x is not None else x for x in (x0_re, x0_im)]
    y, states, last = _fused_reference(q, k, v, Planes(a_re, a_im), Planes(*h0))
    return y, *states, *(x.unsqueeze(-1) if is_wide and x is not None else x for x in last)


def _by_scan(q, k, v, a_re, a_im, x0_re, x0_im, keep_states, backend):  # type: ignore[no-untyped-def]
    scan = lambda a, b, h0: differentiable_scan(a, b, h0, False, backend)  # noqa: E731
    result = _around_scan(scan, q, k, v, Planes(a_re, a_im), Planes(x0_re, x0_im))
    return result.y, *result.states, *result.last


_fused = Differentiable(_forward, _backward, n_inputs=7, reference=_reference, transformed=_by_scan)


def _record(*arguments):  # type: ignore[no-untyped-def]
    y, h_re, h_im, _, _ = _fused(*arguments)  # all states, which the gradient needs
    if arguments[-2]:
        return y, h_re, h_im
    return y, h_re[:, -1:], h_im if arguments[4] is None else h_im[:, -1:]


_operator.record = _record


def fused_complex(q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute complex y (B, L, D) and the last state (B, D) by the CPU's kernels for interleaved numbers.

    q, k and v are real, a (B, L, D) and the state (B, D) complex. Under torch.func and forward derivatives it is the
    scan.
    """
    y, last, _ = _complex(q, k, v, a, state)
    return y, last


def _check_complex(q, k, v, a, x0, keep=False):  # type: ignore[no-untyped-def]
    shape, dtype, device = q.shape, q.dtype, q.device
    if len(shape) != 3 or not shape[1] or dtype not in (torch.float32, torch.float64):
        raise ValueError(sentence("q", kind_of(q), "float32 or float64 (B, L, D), L at least 1"))
    require_layouts(dtype, device, k=(k, shape), v=(v, shape))
    require_layouts(dtype.to_complex(), device, a=(a, shape), x0=(x0, (shape[0], shape[2])))


def _check_complex_back(dy, dlast, q, k, v, a, x0, h):  # type: ignore[no-untyped-def]
    _check_complex(q, k, v, a, x0)
    require_layouts(a.dtype, a.device, h=(h, a.shape), dy=(dy, a.shape), dlast=(dlast, x0.shape))


def _run_complex(results, q, k, v, a, x0, keep):  # type: ignore[no-untyped-def]
    y, last, h = results
    if q.numel() == 0:
        return
    from recurra.ops.gate_loop._cpu import complex_kernels

    dense, x0 = [_in_rows(x) for x in (q, k, v, a)], x0.contiguous()
    (sizes, work), states = _size(q), h if keep else last.unsqueeze(1).expand(a.shape)
    places = *map(describe, dense), x0.data_ptr(), *map(describe, (y, states))
    complex_kernels(_NUMBERS[q.dtype]).forward(*places, *sizes, **work)
    if keep:
        last.copy_(h[:, -1])


def _run_complex_back(results, dy, dlast, q, k, v, a, x0, h):  # type: ignore[no-untyped-def]
    *gradients, carry = results
    carry.zero_() if dlast is None else carry.copy_(dlast)
    if q.numel() == 0:
        return
    from recurra.ops.gate_loop._cpu import complex_kernels

    dy = a.new_zeros(1, 1, a.shape[2]).expand(a.shape) if dy is None else dy
    dense = [_in_rows(x) for x in (dy, q, k, v, a)]
    h, x0, (sizes, work) = h.contiguous(), x0.contiguous(), _size(q)
    places = *map(describe, (*dense, h)), x0.data_ptr(), *map(describe, gradients), carry.data_ptr()
    complex_kernels(_NUMBERS[q.dtype]).backward(*places, *sizes, **work)


_complex_operator = Operator(
    "gate_loop_complex(Tensor q, Tensor k, Tensor v, Tensor a, Tensor x0, bool keep=False) -> (Tensor, Tensor, Tensor)",
    check=_check_complex,
    allocate=lambda q, k, v, a, x0, keep: (
        empty_result(a), x0.new_empty(x0.shape), in_huge_pages(a.new_empty(a.shape if keep else (0,)))
    ),
    run=_run_complex,
    flops=lambda q, *_: 10 * math.prod(q),
)  # fmt: skip
_complex_back = Operator(
    "gate_loop_complex_backward(Tensor? dy, Tensor? dlast, Tensor q, Tensor k, Tensor v, Tensor a, Tensor x0, "
    "Tensor h) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_complex_back,
    allocate=lambda dy, dlast, q, k, v, a, x0, h: tuple(map(empty_result, (q, k, v, a, x0))),
    run=_run_complex_back,
    flops=lambda dy, dlast, q, *_: 22 * math.prod(q),
)


def _complex_by(scan):  # type: ignore[no-untyped-def]
    def function(q, k, v, a, x0):  # type: ignore[no-untyped-def]
        h = scan(a, (k * v).to(a.dtype), x0)
        return q * h, h[:, -1].clone(), h

    return function


_complex = keeping(
    _complex_operator,
    _complex_back,
    n_inputs=5,
    n_outputs=2,
    reference=_complex_by(lambda a, b, h0: linear_scan_reference(a, b, h0, reverse=False)),
    transformed=_complex_by(lambda a, b, h0: differentiable_scan(a, b, h0, False, "numba")),
)


def polar_planes(magnitude: Float[Tensor, "*shape"], phase: Float[Tensor, "*shape"]) -> Planes:
    """Return the planes of a = magnitude * exp(i phase) (GateLoop (25)); the phase is in radians."""
    re, im, *_ = _polar_planes(magnitude, phase)
    return Planes(re, im)


def _polar_forward(keep: bool, magnitude: Tensor, phase: Tensor) -> tuple[tuple, tuple]:
    cos, sin = phase.cos(), phase.sin()
    results = magnitude * cos, magnitude * sin, cos, sin
    return results, results


def _polar_backward(gradients: tuple, saved: tuple, needs: object = None) -> tuple[Tensor, Tensor]:
    """Reuse all four results, instead of computing sine and cosine again."""
    (d_re, d_im, d_cos, d_sin), (re, im, cos, sin) = gradients, saved
    d_re, d_im = (torch.zeros_like(re) if d is None else d for d in (d_re, d_im))
    d_phase = torch.addcmul(d_im * re, d_re, im, value=-1)
    if d_cos is not None:  # only if this backward pass is differentiated again
        d_phase = d_phase - d_cos * sin
    if d_sin is not None:
        d_phase = d_phase + d_sin * cos
    return torch.addcmul(d_re * cos, d_im, sin), d_phase


_polar_planes = Differentiable(
    _polar_forward,
    _polar_backward,
    n_inputs=2,
    reference=lambda magnitude, phase: (magnitude * phase.cos(), magnitude * phase.sin()),
    again=_polar_backward,
)
