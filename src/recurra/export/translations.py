"""The operators of this package in ONNX: a recurrence is one operator Scan."""

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import FLOAT, graph, script
from onnxscript import opset18 as op
from onnxscript.values import Opset

from recurra.export import operators  # noqa: F401  registers recurra::complex_scan

OPSET = 18
"""The version of ONNX operators that files are written in."""

_domain = Opset("recurra", 1)


@script(_domain, default_opset=op)
def real_scan(a: FLOAT, b: FLOAT, h0: FLOAT) -> FLOAT:
    """h_t = a_t h_{t-1} + b_t along axis 1."""

    @graph()
    def step(h_before, a_t, b_t):  # type: ignore[no-untyped-def]
        h_now = op.Add(op.Mul(a_t, h_before), b_t)
        return h_now, op.Identity(h_now)

    _last, h = op.Scan(h0, a, b, body=step, num_scan_inputs=2, scan_input_axes=[1, 1], scan_output_axes=[1])
    return h


@script(_domain, default_opset=op)
def complex_scan(a_re: FLOAT, a_im: FLOAT, b_re: FLOAT, b_im: FLOAT, h0_re: FLOAT, h0_im: FLOAT) -> tuple[FLOAT, FLOAT]:
    """The same for complex numbers in two planes."""

    @graph()
    def step(re_before, im_before, a_re_t, a_im_t, b_re_t, b_im_t):  # type: ignore[no-untyped-def]
        re_now = op.Add(op.Sub(op.Mul(a_re_t, re_before), op.Mul(a_im_t, im_before)), b_re_t)
        im_now = op.Add(op.Add(op.Mul(a_re_t, im_before), op.Mul(a_im_t, re_before)), b_im_t)
        return re_now, im_now, op.Identity(re_now), op.Identity(im_now)

    _last_re, _last_im, h_re, h_im = op.Scan(
        h0_re,
        h0_im,
        a_re,
        a_im,
        b_re,
        b_im,
        body=step,
        num_scan_inputs=4,
        scan_input_axes=[1, 1, 1, 1],
        scan_output_axes=[1, 1],
    )
    return h_re, h_im


@script(_domain, default_opset=op)
def fused(
    q: FLOAT, k: FLOAT, v: FLOAT, a_re: FLOAT, a_im: FLOAT, x0_re: FLOAT, x0_im: FLOAT
) -> tuple[FLOAT, FLOAT, FLOAT]:
    """GateLoop (7)-(8) for one channel a head: Re y, and the last state with a dimension of one step."""

    @graph()
    def step(re_before, im_before, a_re_t, a_im_t, kv_t):  # type: ignore[no-untyped-def]
        re_now = op.Add(op.Sub(op.Mul(a_re_t, re_before), op.Mul(a_im_t, im_before)), kv_t)
        im_now = op.Add(op.Mul(a_re_t, im_before), op.Mul(a_im_t, re_before))
        return re_now, im_now, op.Identity(re_now)

    last_re, last_im, h_re = op.Scan(
        x0_re,
        x0_im,
        a_re,
        a_im,
        op.Mul(k, v),
        body=step,
        num_scan_inputs=3,
        scan_input_axes=[1, 1, 1],
        scan_output_axes=[1],
    )
    one = op.Constant(value_ints=[1])
    return op.Mul(q, h_re), op.Unsqueeze(last_re, one), op.Unsqueeze(last_im, one)


@script(_domain, default_opset=op)
def fused_real(q: FLOAT, k: FLOAT, v: FLOAT, a: FLOAT, x0: FLOAT) -> tuple[FLOAT, FLOAT]:
    """The same for real gates."""

    @graph()
    def step(before, a_t, kv_t):  # type: ignore[no-untyped-def]
        now = op.Add(op.Mul(a_t, before), kv_t)
        return now, op.Identity(now)

    last, h = op.Scan(x0, a, op.Mul(k, v), body=step, num_scan_inputs=2, scan_input_axes=[1, 1], scan_output_axes=[1])
    one = op.Constant(value_ints=[1])
    return op.Mul(q, h), op.Unsqueeze(last, one)


@script(_domain, default_opset=op)
def running_maximum(x: FLOAT) -> FLOAT:
    """The largest number so far along axis 1."""

    @graph()
    def step(before, x_t):  # type: ignore[no-untyped-def]
        now = op.Max(before, x_t)
        return now, op.Identity(now)

    first = op.Squeeze(op.Slice(x, [0], [1], [1]), [1])
    _last, largest = op.Scan(first, x, body=step, num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1])
    return largest


def _cummax(x: FLOAT, dim: int) -> tuple[FLOAT, FLOAT]:
    if dim != 1:
        raise ValueError(f"a running maximum along dimension {dim} cannot be exported, only along time")
    largest = running_maximum(x)
    return largest, largest  # the second stands for the places of the maxima, which no mixer reads


def _linear_scan(a: FLOAT, b: FLOAT, h0: FLOAT, reverse: bool, backend: str = "auto") -> FLOAT:
    if reverse:
        raise ValueError("a scan from the last step to the first cannot be exported")
    return real_scan(a, b, h0)


def _gate_loop_fused(
    q: FLOAT,
    k: FLOAT,
    v: FLOAT,
    a_re: FLOAT,
    a_im: FLOAT | None,
    x0_re: FLOAT,
    x0_im: FLOAT | None,
    keep_states: bool,
    backend: str = "auto",
) -> tuple[FLOAT, FLOAT, FLOAT]:
    if a_im is None or x0_im is None:
        y, last = fused_real(q, k, v, a_re, x0_re)
        return y, last, last  # the third stands for the imaginary part, which nothing reads
    return fused(q, k, v, a_re, a_im, x0_re, x0_im)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.cummax.default: _cummax,
    torch.ops.recurra.complex_scan.default: complex_scan,
    torch.ops.recurra.linear_scan.default: _linear_scan,
    torch.ops.recurra.gate_loop_fused.default: _gate_loop_fused,
}
"""`custom_translation_table` of torch.onnx.export."""
