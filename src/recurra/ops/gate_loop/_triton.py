"""The max-headed GateLoop (d_h = 1) on a GPU, in Triton: one kernel forward, one for all gradients.

    forward   h_t = a_t h_{t-1} + k_t v_t;  y_t = q_t Re h_t
    backward  g_t = dy_t q_t + dh_t + c_t, with c_t = conj(a_{t+1}) g_{t+1} carried from the step that follows;
              dq_t = dy_t Re h_t;  dk_t = v_t Re g_t;  dv_t = k_t Re g_t;  da_t = g_t conj(h_{t-1})
              dh_0 = conj(a_1) g_1

Transitions and states are planes (real, imaginary), float32 or float64; q, k, v, y and their gradients can be bfloat16.
The walk is that of `recurra.ops.scan._triton`: a tile of channels in registers, step by step, and time cut into
chunks if there are too few sequences and channels to fill the card. What enters and leaves a chunk is stored as in the
linear scan, with real and imaginary parts side by side.

Inputs have their channels next to each other, and a batch and a time stride (0 if broadcast); outputs are contiguous.
These functions check nothing: the operators that call them do (`recurra.ops.gate_loop.fused`). As for the scan: tested
in Triton's interpreter, compiled, never timed on a card.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops._toolkit.triton import (
    Plan,
    floats,
    grid,
    load,
    multiply,
    multiply_conjugate,
    on_device_of,
    place,
    plan,
    store,
    tiles_for,
)
from recurra.ops.scan._triton import entering_states


@triton.jit
def _load_planes(re_at, im_at, mask, IS_COMPLEX: tl.constexpr):  # type: ignore[no-untyped-def]
    re = tl.load(re_at, mask=mask, other=0.0)
    im = re
    if IS_COMPLEX:
        im = tl.load(im_at, mask=mask, other=0.0)
    return re, im


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, a_re, a_im, entering, y, h_re, h_im,
    q_batch, q_time, k_batch, k_time, v_batch, v_time, ar_batch, ar_time, ai_batch, ai_time,
    length, channels, chunks, span, IS_COMPLEX: tl.constexpr, KEEP: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fill y (B, L, D), and h with all states (B, L, D) if they are kept, else with the last (B, 1, D)."""
    WIDTH: tl.constexpr = 2 if IS_COMPLEX else 1
    PLANE: tl.constexpr = h_re.dtype.element_ty
    sequence, chunk, d, mask, start = place(channels, chunks, span, BLOCK)
    q_at = q + sequence * q_batch + start * q_time + d
    k_at = k + sequence * k_batch + start * k_time + d
    v_at = v + sequence * v_batch + start * v_time + d
    ar_at = a_re + sequence * ar_batch + start * ar_time + d
    ai_at = a_im + sequence * ai_batch + start * ai_time + d
    at = (sequence * length + start) * channels + d
    x_re, x_im = load(entering + WIDTH * ((sequence * chunks + chunk) * channels + d), mask, IS_COMPLEX)
    stop = tl.minimum(start + span, length)
    for _ in tl.range(start, stop, num_stages=STAGES):
        q_t = tl.load(q_at, mask=mask, other=0.0).to(PLANE)
        k_t = tl.load(k_at, mask=mask, other=0.0).to(PLANE)
        v_t = tl.load(v_at, mask=mask, other=0.0).to(PLANE)
        ar_t, ai_t = _load_planes(ar_at, ai_at, mask, IS_COMPLEX)
        x_re, x_im = multiply(ar_t, ai_t, x_re, x_im, IS_COMPLEX)
        x_re = x_re + k_t * v_t
        if not IS_COMPLEX:
            x_im = x_re
        tl.store(y + at, (q_t * x_re).to(y.dtype.element_ty), mask=mask)
        if KEEP:
            tl.store(h_re + at, x_re, mask=mask)
            if IS_COMPLEX:
                tl.store(h_im + at, x_im, mask=mask)
        q_at, k_at, v_at = q_at + q_time, k_at + k_time, v_at + v_time
        ar_at, ai_at = ar_at + ar_time, ai_at + ai_time
        at += channels
    if not KEEP:
        at = sequence * channels + d
        tl.store(h_re + at, x_re, mask=mask & (stop == length))
        if IS_COMPLEX:
            tl.store(h_im + at, x_im, mask=mask & (stop == length))


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    dy, q, k, v, a_re, a_im, h_re, h_im, x0_re, x0_im, dh_re, dh_im, entering,
    dq, dk, dv, da_re, da_im, dx0_re, dx0_im,
    dy_batch, dy_time, q_batch, q_time, k_batch, k_time, v_batch, v_time, ar_batch, ar_time, ai_batch, ai_time,
    dhr_batch, dhr_time, dhi_batch, dhi_time,
    length, channels, chunks, span, IS_COMPLEX: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fill all gradients, from the last step to the first; entering (B, chunks, D) holds the carries c."""
    WIDTH: tl.constexpr = 2 if IS_COMPLEX else 1
    PLANE: tl.constexpr = h_re.dtype.element_ty
    NUMBER: tl.constexpr = dq.dtype.element_ty
    sequence, chunk, d, mask, start = place(channels, chunks, span, BLOCK)
    time = length - 1 - start
    dy_at = dy + sequence * dy_batch + time * dy_time + d
    q_at = q + sequence * q_batch + time * q_time + d
    k_at = k + sequence * k_batch + time * k_time + d
    v_at = v + sequence * v_batch + time * v_time + d
    ar_at = a_re + sequence * ar_batch + time * ar_time + d
    ai_at = a_im + sequence * ai_batch + time * ai_time + d
    dhr_at = dh_re + sequence * dhr_batch + time * dhr_time + d
    dhi_at = dh_im + sequence * dhi_batch + time * dhi_time + d
    at = (sequence * length + time) * channels + d
    first = sequence * channels + d
    c_re, c_im = load(entering + WIDTH * ((sequence * chunks + chunk) * channels + d), mask, IS_COMPLEX)
    stop = tl.minimum(start + span, length)
    for i in tl.range(start, stop, num_stages=STAGES):
        before = at - channels
        xr_at = tl.where(i == length - 1, x0_re + first, h_re + before)
        xi_at = tl.where(i == length - 1, x0_im + first, h_im + before)
        x_re, x_im = _load_planes(xr_at, xi_at, mask, IS_COMPLEX)
        dy_t = tl.load(dy_at, mask=mask, other=0.0).to(PLANE)
        q_t = tl.load(q_at, mask=mask, other=0.0).to(PLANE)
        k_t = tl.load(k_at, mask=mask, other=0.0).to(PLANE)
        v_t = tl.load(v_at, mask=mask, other=0.0).to(PLANE)
        h_t = tl.load(h_re + at, mask=mask, other=0.0)
        ar_t, ai_t = _load_planes(ar_at, ai_at, mask, IS_COMPLEX)
        dhr_t, dhi_t = _load_planes(dhr_at, dhi_at, mask, IS_COMPLEX)
        g_re = dy_t * q_t + dhr_t + c_re
        g_im = g_re
        if IS_COMPLEX:
            g_im = dhi_t + c_im
        tl.store(dq + at, (dy_t * h_t).to(NUMBER), mask=mask)
        tl.store(dk + at, (g_re * v_t).to(NUMBER), mask=mask)
        tl.store(dv + at, (g_re * k_t).to(NUMBER), mask=mask)
        dar_t, dai_t = multiply_conjugate(g_re, g_im, x_re, x_im, IS_COMPLEX)
        tl.store(da_re + at, dar_t, mask=mask)
        if IS_COMPLEX:
            tl.store(da_im + at, dai_t, mask=mask)
        c_re, c_im = multiply_conjugate(g_re, g_im, ar_t, ai_t, IS_COMPLEX)
        dy_at, q_at, k_at, v_at = dy_at - dy_time, q_at - q_time, k_at - k_time, v_at - v_time
        ar_at, ai_at, dhr_at, dhi_at = ar_at - ar_time, ai_at - ai_time, dhr_at - dhr_time, dhi_at - dhi_time
        at = before
    tl.store(dx0_re + first, c_re, mask=mask & (stop == length))
    if IS_COMPLEX:
        tl.store(dx0_im + first, c_im, mask=mask & (stop == length))


@triton.jit
def _summarise(  # type: ignore[no-untyped-def]
    u, w, a_re, a_im, dh_re, dh_im, products, lasts,
    u_batch, u_time, w_batch, w_time, ar_batch, ar_time, ai_batch, ai_time, dhr_batch, dhr_time, dhi_batch, dhi_time,
    length, channels, chunks, span, IS_BACKWARD: tl.constexpr, IS_COMPLEX: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fill products and lasts (B, chunks, D): a whole chunk turns x into products * x + lasts."""
    WIDTH: tl.constexpr = 2 if IS_COMPLEX else 1
    PLANE: tl.constexpr = products.dtype.element_ty
    STEP: tl.constexpr = -1 if IS_BACKWARD else 1
    sequence, chunk, d, mask, start = place(channels, chunks, span, BLOCK)
    time = start
    if IS_BACKWARD:
        time = length - 1 - start
    u_at = u + sequence * u_batch + time * u_time + d
    w_at = w + sequence * w_batch + time * w_time + d
    ar_at = a_re + sequence * ar_batch + time * ar_time + d
    ai_at = a_im + sequence * ai_batch + time * ai_time + d
    dhr_at = dh_re + sequence * dhr_batch + time * dhr_time + d
    dhi_at = dh_im + sequence * dhi_batch + time * dhi_time + d
    x_re = tl.zeros([BLOCK], PLANE)
    x_im, p_re, p_im = x_re, x_re + 1, x_re
    if not IS_COMPLEX:
        p_im = p_re
    for _ in tl.range(0, span, num_stages=STAGES):
        b_t = tl.load(u_at, mask=mask, other=0.0).to(PLANE) * tl.load(w_at, mask=mask, other=0.0).to(PLANE)
        ar_t, ai_t = _load_planes(ar_at, ai_at, mask, IS_COMPLEX)
        if IS_BACKWARD:
            dhr_t, dhi_t = _load_planes(dhr_at, dhi_at, mask, IS_COMPLEX)
            x_re, x_im = x_re + b_t + dhr_t, x_im + dhi_t
            x_re, x_im = multiply_conjugate(x_re, x_im, ar_t, ai_t, IS_COMPLEX)
            p_re, p_im = multiply_conjugate(p_re, p_im, ar_t, ai_t, IS_COMPLEX)
        else:
            x_re, x_im = multiply(ar_t, ai_t, x_re, x_im, IS_COMPLEX)
            x_re = x_re + b_t
            p_re, p_im = multiply(ar_t, ai_t, p_re, p_im, IS_COMPLEX)
        u_at += STEP * u_time
        w_at += STEP * w_time
        ar_at += STEP * ar_time
        ai_at += STEP * ai_time
        dhr_at += STEP * dhr_time
        dhi_at += STEP * dhi_time
    at = WIDTH * ((sequence * chunks + chunk) * channels + d)
    store(products + at, p_re, p_im, mask, IS_COMPLEX)
    store(lasts + at, x_re, x_im, mask, IS_COMPLEX)


def _plan(q: Tensor, is_complex: bool) -> Plan:
    """Plan the walk over (B, L, D)."""
    batch, length, channels = q.shape
    return plan(batch, length, channels, q.device, tiles_for("fused", q.dtype, is_complex, q.device))


def _strides(*tensors: Tensor) -> list[int]:
    return [n for tensor in tensors for n in tensor.stride()[:2]]


def _joined(re: Tensor, im: Tensor | None) -> Tensor:
    return re if im is None else torch.complex(re, im)


def forward_into(
    y: Tensor, h_re: Tensor, h_im: Tensor, q: Tensor, k: Tensor, v: Tensor,
    a_re: Tensor, a_im: Tensor | None, x0_re: Tensor, x0_im: Tensor | None,
) -> None:  # fmt: skip
    """Fill y and the states, all or only the last (length 1), of a's type; x0 is the state that enters."""
    batch, length, channels = q.shape
    laid_out = _plan(q, a_im is not None)
    is_complex, chunks = a_im is not None, laid_out.chunks - 1
    gates = a_re, a_re if a_im is None else a_im  # without an imaginary plane its address is not used
    x0 = _joined(x0_re, x0_im)
    products, lasts = (torch.empty((batch, chunks, channels), dtype=x0.dtype, device=q.device) for _ in range(2))
    with on_device_of(q):
        if chunks:
            _summarise[grid(batch, chunks, channels, laid_out)](
                k, v, *gates, *gates, *map(floats, (products, lasts)), *_strides(k, v, *gates, *gates),
                length, channels, chunks, laid_out.span,
                IS_BACKWARD=False, IS_COMPLEX=is_complex, **laid_out.options,
            )  # fmt: skip
        entering = entering_states(products, lasts, x0)
        _forward[grid(batch, laid_out.chunks, channels, laid_out)](
            q, k, v, *gates, floats(entering), y, h_re, h_im if is_complex else h_re, *_strides(q, k, v, *gates),
            length, channels, laid_out.chunks, laid_out.span,
            IS_COMPLEX=is_complex, KEEP=h_re.shape[1] == length, **laid_out.options,
        )  # fmt: skip


def backward_into(
    gradients: list[Tensor], dy: Tensor, q: Tensor, k: Tensor, v: Tensor,
    a_re: Tensor, a_im: Tensor | None, h_re: Tensor, h_im: Tensor, x0_re: Tensor, x0_im: Tensor | None,
    dh_re: Tensor, dh_im: Tensor | None,
) -> None:  # fmt: skip
    """Fill dq, dk, dv, the planes of da and those of dx0, which come in holding the gradient of the last state."""
    batch, length, channels = q.shape
    laid_out = _plan(q, a_im is not None)
    chunks = laid_out.chunks - 1
    if a_im is None or x0_im is None or dh_im is None:
        dq, dk, dv, da_re, dx0_re = gradients
        da_im, dx0_im, carry = da_re, dx0_re, dx0_re.clone()
        gates, dh, h, x0 = (a_re, a_re), (dh_re, dh_re), (h_re, h_re), (x0_re, x0_re)
    else:
        dq, dk, dv, da_re, da_im, dx0_re, dx0_im = gradients
        carry = torch.complex(dx0_re, dx0_im)
        gates, dh, h, x0 = (a_re, a_im), (dh_re, dh_im), (h_re, h_im), (x0_re, x0_im)
    products, lasts = (torch.empty((batch, chunks, channels), dtype=carry.dtype, device=q.device) for _ in range(2))
    with on_device_of(q):
        if chunks:
            _summarise[grid(batch, chunks, channels, laid_out)](
                dy, q, *gates, *dh, *map(floats, (products, lasts)), *_strides(dy, q, *gates, *dh),
                length, channels, chunks, laid_out.span,
                IS_BACKWARD=True, IS_COMPLEX=carry.is_complex(), **laid_out.options,
            )  # fmt: skip
        entering = entering_states(products, lasts, carry)
        _backward[grid(batch, laid_out.chunks, channels, laid_out)](
            dy, q, k, v, *gates, *h, *x0, *dh, floats(entering),
            dq, dk, dv, da_re, da_im, dx0_re, dx0_im, *_strides(dy, q, k, v, *gates, *dh),
            length, channels, laid_out.chunks, laid_out.span, IS_COMPLEX=carry.is_complex(), **laid_out.options,
        )  # fmt: skip
