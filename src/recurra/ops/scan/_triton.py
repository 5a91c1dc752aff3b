"""The linear recurrence on a GPU, in Triton.

    forward   h_t = a_t h_{t-1} + b_t
    backward  g_t = dh_t + c_t, with c_t = conj(a_{t+1}) g_{t+1} carried from the step that follows;
              db_t = g_t;  da_t = g_t conj(h_{t-1});  dh_0 = conj(a_1) g_1

A program walks over time for a tile of neighbouring channels, with the state in registers. A step is one coalesced read
per tensor, and the reads of later steps are already in flight (`num_stages`). It forms no product of transitions, so
transitions that are zero, large, infinite or NaN act as they do in the reference.

If there are too few sequences and channels to fill the card, time is cut into chunks as well. A chunk maps the state
that enters it as x -> P x + S. One launch computes every chunk's P and S, the same recurrence over those gives the
state that enters each chunk, and a second launch walks the chunks side by side. That reads the inputs twice, and it
does form the products P. Strides count numbers, complex ones too.
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


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    a, b, entering, h, a_batch, a_time, a_channel, b_batch, b_time, b_channel,
    length, channels, chunks, span, first, step, IS_COMPLEX: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fill h at the times first, first + step, ...; entering (B, chunks, D) holds the state before each chunk."""
    WIDTH: tl.constexpr = 2 if IS_COMPLEX else 1
    sequence, chunk, d, mask, start = place(channels, chunks, span, BLOCK)
    time = first + step * start
    a_at = a + WIDTH * (sequence * a_batch + time * a_time + d * a_channel)
    b_at = b + WIDTH * (sequence * b_batch + time * b_time + d * b_channel)
    h_at = h + WIDTH * ((sequence * length + time) * channels + d)
    h_re, h_im = load(entering + WIDTH * ((sequence * chunks + chunk) * channels + d), mask, IS_COMPLEX)
    for _ in tl.range(0, tl.minimum(span, length - start), num_stages=STAGES):
        a_re, a_im = load(a_at, mask, IS_COMPLEX)
        b_re, b_im = load(b_at, mask, IS_COMPLEX)
        h_re, h_im = multiply(a_re, a_im, h_re, h_im, IS_COMPLEX)
        h_re, h_im = h_re + b_re, h_im + b_im
        store(h_at, h_re, h_im, mask, IS_COMPLEX)
        a_at += WIDTH * step * a_time
        b_at += WIDTH * step * b_time
        h_at += WIDTH * step * channels


@triton.jit
def _walk_backward(  # type: ignore[no-untyped-def]
    dh, a, h, h0, entering, da, db, dh0, dh_batch, dh_time, dh_channel, a_batch, a_time, a_channel,
    length, channels, chunks, span, last, step, IS_COMPLEX: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fill da, db and dh0 backwards from the time `last` by `step`; entering (B, chunks, D) holds the carries c."""
    WIDTH: tl.constexpr = 2 if IS_COMPLEX else 1
    sequence, chunk, d, mask, start = place(channels, chunks, span, BLOCK)
    time = last + step * start
    dh_at = dh + WIDTH * (sequence * dh_batch + time * dh_time + d * dh_channel)
    a_at = a + WIDTH * (sequence * a_batch + time * a_time + d * a_channel)
    at = WIDTH * ((sequence * length + time) * channels + d)
    c_re, c_im = load(entering + WIDTH * ((sequence * chunks + chunk) * channels + d), mask, IS_COMPLEX)
    h0_at = h0 + WIDTH * (sequence * channels + d)
    stop = tl.minimum(start + span, length)
    for i in tl.range(start, stop, num_stages=STAGES):
        before = at + WIDTH * step * channels
        x_re, x_im = load(tl.where(i == length - 1, h0_at, h + before), mask, IS_COMPLEX)
        dh_re, dh_im = load(dh_at, mask, IS_COMPLEX)
        a_re, a_im = load(a_at, mask, IS_COMPLEX)
        g_re, g_im = dh_re + c_re, dh_im + c_im
        da_re, da_im = multiply_conjugate(g_re, g_im, x_re, x_im, IS_COMPLEX)
        store(db + at, g_re, g_im, mask, IS_COMPLEX)
        store(da + at, da_re, da_im, mask, IS_COMPLEX)
        c_re, c_im = multiply_conjugate(g_re, g_im, a_re, a_im, IS_COMPLEX)
        dh_at += WIDTH * step * dh_time
        a_at += WIDTH * step * a_time
        at = before
    store(dh0 + WIDTH * (sequence * channels + d), c_re, c_im, mask & (stop == length), IS_COMPLEX)


@triton.jit
def _chunk_products(  # type: ignore[no-untyped-def]
    a, b, products, lasts, a_batch, a_time, a_channel, b_batch, b_time, b_channel,
    length, channels, chunks, span, first, step,
    IS_BACKWARD: tl.constexpr, IS_COMPLEX: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fill products and lasts (B, chunks, D): a whole chunk turns x into products * x + lasts."""
    WIDTH: tl.constexpr = 2 if IS_COMPLEX else 1
    sequence, chunk, d, mask, start = place(channels, chunks, span, BLOCK)
    time = first + step * start
    a_at = a + WIDTH * (sequence * a_batch + time * a_time + d * a_channel)
    b_at = b + WIDTH * (sequence * b_batch + time * b_time + d * b_channel)
    x_re = tl.zeros([BLOCK], products.dtype.element_ty)
    x_im, p_re, p_im = x_re, x_re + 1, x_re
    if not IS_COMPLEX:
        p_im = p_re
    for _ in tl.range(0, span, num_stages=STAGES):
        a_re, a_im = load(a_at, mask, IS_COMPLEX)
        b_re, b_im = load(b_at, mask, IS_COMPLEX)
        if IS_BACKWARD:
            p_re, p_im = multiply_conjugate(p_re, p_im, a_re, a_im, IS_COMPLEX)
            x_re, x_im = multiply_conjugate(x_re + b_re, x_im + b_im, a_re, a_im, IS_COMPLEX)
        else:
            p_re, p_im = multiply(a_re, a_im, p_re, p_im, IS_COMPLEX)
            x_re, x_im = multiply(a_re, a_im, x_re, x_im, IS_COMPLEX)
            x_re, x_im = x_re + b_re, x_im + b_im
        a_at += WIDTH * step * a_time
        b_at += WIDTH * step * b_time
    at = WIDTH * ((sequence * chunks + chunk) * channels + d)
    store(products + at, p_re, p_im, mask, IS_COMPLEX)
    store(lasts + at, x_re, x_im, mask, IS_COMPLEX)


def _plan(h: Tensor) -> Plan:
    """Plan the walk over (B, L, D)."""
    batch, length, channels = h.shape
    number = h.dtype.to_real() if h.is_complex() else h.dtype
    return plan(batch, length, channels, h.device, tiles_for("scan", number, h.is_complex(), h.device))


def entering_states(products: Tensor, lasts: Tensor, x0: Tensor) -> Tensor:
    """Return the states that enter the chunks (B, chunks + 1, D), first x0 (B, D); the last chunk has no summary."""
    if not products.shape[1]:
        return x0.unsqueeze(1).contiguous()
    states = torch.empty_like(lasts)
    chunks = states.shape[1]
    whole = _plan(states)._replace(span=chunks, chunks=1)
    _run_walk(states, products, lasts, x0.unsqueeze(1).contiguous(), whole, 0, 1)
    return torch.cat([x0.unsqueeze(1), states], 1)


def _run_walk(h: Tensor, a: Tensor, b: Tensor, entering: Tensor, laid_out: Plan, first: int, step: int) -> None:
    batch, length, channels = h.shape
    _walk[grid(batch, laid_out.chunks, channels, laid_out)](
        *map(floats, (a, b, entering, h)), *a.stride(), *b.stride(),
        length, channels, laid_out.chunks, laid_out.span, first, step, IS_COMPLEX=h.is_complex(), **laid_out.options,
    )  # fmt: skip


def _carries(a: Tensor, b: Tensor, x0: Tensor, laid_out: Plan, first: int, step: int, is_backward: bool) -> Tensor:
    batch, length, channels = b.shape
    chunks = laid_out.chunks - 1
    products, lasts = (torch.empty((batch, chunks, channels), dtype=b.dtype, device=b.device) for _ in range(2))
    if chunks:
        _chunk_products[grid(batch, chunks, channels, laid_out)](
            *map(floats, (a, b, products, lasts)), *a.stride(), *b.stride(),
            length, channels, chunks, laid_out.span, first, step,
            IS_BACKWARD=is_backward, IS_COMPLEX=b.is_complex(), **laid_out.options,
        )  # fmt: skip
    return entering_states(products, lasts, x0)


def scan_into(h: Tensor, a: Tensor, b: Tensor, h0: Tensor, reverse: bool) -> None:
    """Fill h (B, L, D), contiguous, from a and b of its shape with any strides and h0 (B, D), all of one type."""
    length = b.shape[1]
    first, step = (length - 1, -1) if reverse else (0, 1)
    laid_out = _plan(b)
    with on_device_of(b):
        entering = _carries(a, b, h0, laid_out, first, step, is_backward=False)
        _run_walk(h, a, b, entering, laid_out, first, step)


def scan_backward_into(
    da: Tensor, db: Tensor, dh0: Tensor, dh: Tensor, a: Tensor, h: Tensor, h0: Tensor, reverse: bool
) -> None:
    """Fill the gradients da, db (B, L, D) and dh0 (B, D), contiguous, of the scan that computed h."""
    batch, length, channels = h.shape
    last, step = (0, 1) if reverse else (length - 1, -1)
    laid_out = _plan(h)
    h, h0 = h.contiguous(), h0.contiguous()
    with on_device_of(h):
        entering = _carries(a, dh, torch.zeros_like(h0), laid_out, last, step, is_backward=True)
        _walk_backward[grid(batch, laid_out.chunks, channels, laid_out)](
            *map(floats, (dh, a, h, h0, entering, da, db, dh0)), *dh.stride(), *a.stride(),
            length, channels, laid_out.chunks, laid_out.span, last, step,
            IS_COMPLEX=h.is_complex(), **laid_out.options,
        )  # fmt: skip
