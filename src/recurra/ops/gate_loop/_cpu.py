"""The max-headed GateLoop (d_h = 1) on the CPU: one kernel forward, one for all gradients; and both for complex y.

    forward   h_t = a_t h_{t-1} + k_t v_t;  y_t = q_t Re h_t
    backward  g_t = dy_t q_t + dh_t + c_t, with c_t = conj(a_{t+1}) g_{t+1} carried from the step that follows;
              dq_t = dy_t Re h_t;  dk_t = v_t Re g_t;  dv_t = k_t Re g_t;  da_t = g_t conj(h_{t-1})
              dh_0 = conj(a_1) g_1

Complex numbers are two planes (real, imaginary). A real recurrence leaves the imaginary ones alone, and the compiler
drops what only they need. For complex y they are interleaved instead, as in torch. In planes, q, k, v, y and their
gradients can be bfloat16; transitions and states cannot.

A tensor is passed as (address, batch stride, time stride), with its channels next to each other. The walk is that of
the linear scan: whole rows, step by step, because only along such streams does the hardware fetch ahead. States with a
time stride of 0 keep only the last step. A carry lives in the buffer of dh_0, which first holds the gradient of the
last state and in the end that of the first.
"""

from collections.abc import Callable
from functools import cache

from recurra.ops._toolkit.launch import Kernel, KernelPair, compile_function, compile_inline
from recurra.ops._toolkit.vectors import (
    WIDTH,
    Lanes,
    as_complex,
    conjugate,
    load,
    prefetch,
    real_parts,
    scaled,
    store,
    width_of,
)
from recurra.ops.scan._cpu import part_of_job

_AHEAD = 2048  # channels: how far ahead of the walk rows are prefetched


@compile_inline
def _at(tensor, sequence, time, size):  # type: ignore[no-untyped-def]
    """Return the address of the row of one sequence at one time."""
    start, batch_stride, time_stride = tensor
    return start + size * (sequence * batch_stride + time * time_stride)


@compile_inline
def _fetch(address, start, stop, lanes):  # type: ignore[no-untyped-def]
    """Prefetch a part of a row."""
    for d in range(start, stop, width_of(lanes)):
        prefetch(address, d, lanes)


@compile_inline
def _row(  # type: ignore[no-untyped-def]
    q, k, v, a_re, a_im, x_re, x_im, y, h_re, h_im, start, stop, io, plane, far_io, far, is_complex
):
    """Take one step forward over a part of a row; x is the state that enters it."""
    for d in range(start, stop, width_of(plane)):
        prefetch(q, d + far_io, io)
        prefetch(k, d + far_io, io)
        prefetch(v, d + far_io, io)
        prefetch(a_re, d + far, plane)
        if is_complex:
            prefetch(a_im, d + far, plane)
        a_r, x_r = load(a_re, d, plane), load(x_re, d, plane)
        h_r = a_r * x_r
        if is_complex:
            a_i, x_i = load(a_im, d, plane), load(x_im, d, plane)
            h_r = h_r - a_i * x_i
            store(h_im, d, plane, a_r * x_i + a_i * x_r)
        h_r = h_r + load(k, d, io) * load(v, d, io)
        store(h_re, d, plane, h_r)
        store(y, d, io, load(q, d, io) * h_r)


@compile_inline
def _row_back(  # type: ignore[no-untyped-def]
    dy, q, k, v, a_re, a_im, h_re, x_re, x_im, dh_re, dh_im, dq, dk, dv, da_re, da_im, c_re, c_im,
    start, stop, io, plane, is_complex,
):  # fmt: skip
    """Take one step backward over a part of a row; x is the state that entered the step, c the carry."""
    for d in range(start, stop, width_of(plane)):
        dy_t, a_r, x_r = load(dy, d, io), load(a_re, d, plane), load(x_re, d, plane)
        g_r = dy_t * load(q, d, io) + load(dh_re, d, plane) + load(c_re, d, plane)
        store(dq, d, io, dy_t * load(h_re, d, plane))
        store(dk, d, io, g_r * load(v, d, io))
        store(dv, d, io, g_r * load(k, d, io))
        if is_complex:
            a_i, x_i = load(a_im, d, plane), load(x_im, d, plane)
            g_i = load(dh_im, d, plane) + load(c_im, d, plane)
            store(da_re, d, plane, g_r * x_r + g_i * x_i)
            store(da_im, d, plane, g_i * x_r - g_r * x_i)
            store(c_re, d, plane, a_r * g_r + a_i * g_i)
            store(c_im, d, plane, a_r * g_i - a_i * g_r)
        else:
            store(da_re, d, plane, g_r * x_r)
            store(c_re, d, plane, a_r * g_r)


def _make_forward(is_complex: bool, io: Lanes, plane: Lanes, io_1: Lanes, plane_1: Lanes) -> Kernel:
    n, m = io.n_bytes, plane.n_bytes

    def forward(q, k, v, a_re, a_im, x0_re, x0_im, y, h_re, h_im, batch, length, row, span, share):  # type: ignore[no-untyped-def]
        ahead = max(1, _AHEAD // row)
        for job in range(share[0], share[1]):
            b, start, middle, stop = part_of_job(job, row, span)
            x_re, x_im = x0_re + m * b * row, x0_im + m * b * row
            for t in range(length):
                q_t, k_t, v_t, y_t = _at(q, b, t, n), _at(k, b, t, n), _at(v, b, t, n), _at(y, b, t, n)
                ar_t, ai_t = _at(a_re, b, t, m), _at(a_im, b, t, m)
                hr_t, hi_t = _at(h_re, b, t, m), _at(h_im, b, t, m)
                _row(
                    q_t, k_t, v_t, ar_t, ai_t, x_re, x_im, y_t, hr_t, hi_t, start, middle, io, plane,
                    ahead * q[2], ahead * a_re[2], is_complex,
                )  # fmt: skip
                _row(
                    q_t, k_t, v_t, ar_t, ai_t, x_re, x_im, y_t, hr_t, hi_t, middle, stop, io_1, plane_1,
                    0, 0, is_complex,
                )  # fmt: skip
                x_re, x_im = hr_t, hi_t

    return Kernel(forward)


def _make_backward(is_complex: bool, io: Lanes, plane: Lanes, io_1: Lanes, plane_1: Lanes) -> Kernel:
    n, m = io.n_bytes, plane.n_bytes

    def backward(  # type: ignore[no-untyped-def]
        dy, q, k, v, a_re, a_im, h_re, h_im, x0_re, x0_im, dh_re, dh_im,
        dq, dk, dv, da_re, da_im, c0_re, c0_im, batch, length, row, span, share,
    ):  # fmt: skip
        ahead = max(1, _AHEAD // row)
        for job in range(share[0], share[1]):
            b, start, middle, stop = part_of_job(job, row, span)
            c_re, c_im = c0_re + m * b * row, c0_im + m * b * row
            for i in range(length):
                t, far = length - 1 - i, length - 1 - i - ahead
                for tensor in (dy, q, k, v, dq, dk, dv):
                    _fetch(_at(tensor, b, far, n), start, middle, io)
                for tensor in (a_re, h_re, da_re):
                    _fetch(_at(tensor, b, far, m), start, middle, plane)
                if is_complex:
                    for tensor in (a_im, h_im, da_im):
                        _fetch(_at(tensor, b, far, m), start, middle, plane)
                x_re = _at(h_re, b, t - 1, m) if t > 0 else x0_re + m * b * row
                x_im = _at(h_im, b, t - 1, m) if t > 0 else x0_im + m * b * row
                dy_t, q_t, k_t, v_t = _at(dy, b, t, n), _at(q, b, t, n), _at(k, b, t, n), _at(v, b, t, n)
                ar_t, ai_t, hr_t = _at(a_re, b, t, m), _at(a_im, b, t, m), _at(h_re, b, t, m)
                dhr_t, dhi_t = _at(dh_re, b, t, m), _at(dh_im, b, t, m)
                dq_t, dk_t, dv_t = _at(dq, b, t, n), _at(dk, b, t, n), _at(dv, b, t, n)
                dar_t, dai_t = _at(da_re, b, t, m), _at(da_im, b, t, m)
                _row_back(
                    dy_t, q_t, k_t, v_t, ar_t, ai_t, hr_t, x_re, x_im, dhr_t, dhi_t,
                    dq_t, dk_t, dv_t, dar_t, dai_t, c_re, c_im, start, middle, io, plane, is_complex,
                )  # fmt: skip
                _row_back(
                    dy_t, q_t, k_t, v_t, ar_t, ai_t, hr_t, x_re, x_im, dhr_t, dhi_t,
                    dq_t, dk_t, dv_t, dar_t, dai_t, c_re, c_im, middle, stop, io_1, plane_1, is_complex,
                )  # fmt: skip

    return Kernel(backward)


@cache
def fused_kernels(number: str, plane: str, is_complex: bool) -> KernelPair:
    """Return the kernels for q, k, v of type `number` and a and h of type `plane`; they compile when first called.

    Both take two planes of everything: in a real recurrence, the real one twice.
    """
    lanes = Lanes(number, WIDTH), Lanes(plane, WIDTH), Lanes(number, 1), Lanes(plane, 1)
    return KernelPair(_make_forward(is_complex, *lanes), _make_backward(is_complex, *lanes))


@cache
def plane_kernels(plane: str) -> tuple[Callable, Callable]:
    """Return functions of (address of complex numbers, those of two planes, n) that take them apart and join them."""
    one = Lanes(plane, 1)

    def take_apart(z, re, im, n):  # type: ignore[no-untyped-def]
        for i in range(n):
            store(re, i, one, load(z, 2 * i, one))
            store(im, i, one, load(z, 2 * i + 1, one))

    def join(z, re, im, n):  # type: ignore[no-untyped-def]
        for i in range(n):
            store(z, 2 * i, one, load(re, i, one))
            store(z, 2 * i + 1, one, load(im, i, one))

    return compile_function(take_apart), compile_function(join)


# Complex y. A tensor of D complex channels is 2 D floats wide; q, k and v are real, and D wide.


@compile_inline
def _complex_row(q, k, v, a, x, h, y, far, start, stop, io, pairs):  # type: ignore[no-untyped-def]
    """Take one step forward over a part of a row; `far` steps ahead lie the rows to fetch: floats of q, k, v and a."""
    far_q, far_k, far_v, far_a = far
    for d in range(start, stop, width_of(io)):
        prefetch(q, d + far_q, io)
        prefetch(k, d + far_k, io)
        prefetch(v, d + far_v, io)
        prefetch(a, 2 * d + far_a, io)
        prefetch(a, 2 * d + WIDTH + far_a, io)
        h_t = load(a, 2 * d, pairs) * load(x, 2 * d, pairs) + as_complex(load(k, d, io) * load(v, d, io))
        store(h, 2 * d, pairs, h_t)
        store(y, 2 * d, pairs, scaled(load(q, d, io), h_t))


@compile_inline
def _complex_row_back(dy, q, k, v, a, h, x, dq, dk, dv, da, c, start, stop, io, pairs):  # type: ignore[no-untyped-def]
    """Take one step backward over a part of a row; x is the state that entered the step, c the carry."""
    for d in range(start, stop, width_of(io)):
        dy_t = load(dy, 2 * d, pairs)
        g = scaled(load(q, d, io), dy_t) + load(c, 2 * d, pairs)
        store(dq, d, io, real_parts(dy_t * conjugate(load(h, 2 * d, pairs))))
        store(dk, d, io, real_parts(g) * load(v, d, io))
        store(dv, d, io, real_parts(g) * load(k, d, io))
        store(da, 2 * d, pairs, g * conjugate(load(x, 2 * d, pairs)))
        store(c, 2 * d, pairs, conjugate(load(a, 2 * d, pairs)) * g)


def _make_complex_forward(io: Lanes, pairs: Lanes, io_1: Lanes, pairs_1: Lanes) -> Kernel:
    n = io.n_bytes

    def forward(q, k, v, a, x0, y, h, batch, length, row, span, share):  # type: ignore[no-untyped-def]
        ahead = max(1, _AHEAD // row)
        far, near = (ahead * q[2], ahead * k[2], ahead * v[2], ahead * a[2]), (0, 0, 0, 0)
        for job in range(share[0], share[1]):
            b, start, middle, stop = part_of_job(job, row, span)
            x = x0 + 2 * n * b * row
            for t in range(length):
                q_t, k_t, v_t, a_t = _at(q, b, t, n), _at(k, b, t, n), _at(v, b, t, n), _at(a, b, t, n)
                h_t, y_t = _at(h, b, t, n), _at(y, b, t, n)
                _complex_row(q_t, k_t, v_t, a_t, x, h_t, y_t, far, start, middle, io, pairs)
                _complex_row(q_t, k_t, v_t, a_t, x, h_t, y_t, near, middle, stop, io_1, pairs_1)
                x = h_t

    return Kernel(forward)


def _make_complex_backward(io: Lanes, pairs: Lanes, io_1: Lanes, pairs_1: Lanes) -> Kernel:
    n = io.n_bytes

    def backward(dy, q, k, v, a, h, x0, dq, dk, dv, da, c0, batch, length, row, span, share):  # type: ignore[no-untyped-def]
        ahead = max(1, _AHEAD // row)
        for job in range(share[0], share[1]):
            b, start, middle, stop = part_of_job(job, row, span)
            c = c0 + 2 * n * b * row
            for t in range(length - 1, -1, -1):
                for tensor in (q, k, v, dq, dk, dv):
                    _fetch(_at(tensor, b, t - ahead, n), start, middle, io)
                for tensor in (dy, a, h, da):
                    _fetch(_at(tensor, b, t - ahead, n), 2 * start, 2 * middle, io)
                x = _at(h, b, t - 1, n) if t > 0 else x0 + 2 * n * b * row
                dy_t, q_t, k_t, v_t = _at(dy, b, t, n), _at(q, b, t, n), _at(k, b, t, n), _at(v, b, t, n)
                a_t, h_t, da_t = _at(a, b, t, n), _at(h, b, t, n), _at(da, b, t, n)
                dq_t, dk_t, dv_t = _at(dq, b, t, n), _at(dk, b, t, n), _at(dv, b, t, n)
                _complex_row_back(dy_t, q_t, k_t, v_t, a_t, h_t, x, dq_t, dk_t, dv_t, da_t, c, start, middle, io, pairs)
                _complex_row_back(
                    dy_t, q_t, k_t, v_t, a_t, h_t, x, dq_t, dk_t, dv_t, da_t, c, middle, stop, io_1, pairs_1
                )

    return Kernel(backward)


@cache
def complex_kernels(number: str) -> KernelPair:
    """Return the kernels for real q, k and v of type `number` and interleaved a, h and y; they compile when called."""
    lanes = Lanes(number, WIDTH), Lanes(number, 2 * WIDTH, True), Lanes(number, 1), Lanes(number, 2, True)
    return KernelPair(_make_complex_forward(*lanes), _make_complex_backward(*lanes))
