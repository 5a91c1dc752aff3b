"""The linear recurrence on the CPU, as fast as the memory.

    forward   h_t = a_t h_{t-1} + b_t
    backward  g_t = dh_t + conj(a_{t+1}) g_{t+1};  db_t = g_t;  da_t = g_t conj(h_{t-1});  dh_0 = conj(a_1) g_1

A job walks over time through whole rows (all channels of a step), so that it reads and writes its arrays from end to
end: only along such streams does the hardware fetch ahead, and a walk down a narrow tile of channels ran at a third of
the speed. The state needs no registers: the row written last is still in the first-level cache. (Narrow rows, where it
does need them, have kernels of their own in `recurra.scan.narrow_kernels`.) If there are fewer sequences than threads,
jobs split the rows.

A tensor is passed as (address, batch stride, time stride), with its channels next to each other. Strides and rows count
floats, so a row of D complex channels is 2 D wide.
"""

from functools import cache

from numba import prange

from recurra.kernels.launch import Kernel, KernelPair, compile_inline
from recurra.kernels.vector import WIDTH, Lanes, conjugate, load, prefetch, store, width_of

_AHEAD = 2048  # floats: how far ahead of the walk rows are prefetched


@compile_inline
def _recur(a, x, b, out, a_ahead, b_ahead, out_ahead, start, stop, lanes):  # type: ignore[no-untyped-def]
    """out = a x + b over a part of a row; prefetches the same part of later rows."""
    for d in range(start, stop, width_of(lanes)):
        prefetch(a, d + a_ahead, lanes)
        prefetch(b, d + b_ahead, lanes)
        prefetch(out, d + out_ahead, lanes)
        store(out, d, lanes, load(a, d, lanes) * load(x, d, lanes) + load(b, d, lanes))


@compile_inline
def _recur_back(a, g, dh, out, a_ahead, dh_ahead, out_ahead, start, stop, lanes):  # type: ignore[no-untyped-def]
    """out = conj(a) g + dh over a part of a row."""
    for d in range(start, stop, width_of(lanes)):
        prefetch(a, d + a_ahead, lanes)
        prefetch(dh, d + dh_ahead, lanes)
        prefetch(out, d + out_ahead, lanes)
        store(out, d, lanes, conjugate(load(a, d, lanes)) * load(g, d, lanes) + load(dh, d, lanes))


@compile_inline
def _product(g, x, out, x_ahead, out_ahead, start, stop, lanes):  # type: ignore[no-untyped-def]
    """out = g conj(x) over a part of a row."""
    for d in range(start, stop, width_of(lanes)):
        prefetch(x, d + x_ahead, lanes)
        prefetch(out, d + out_ahead, lanes)
        store(out, d, lanes, load(g, d, lanes) * conjugate(load(x, d, lanes)))


def _make_forward(wide: Lanes, narrow: Lanes) -> Kernel:
    size = wide.n_bytes

    def forward(a, b, h0, h, batch, length, row, span, first, step):  # type: ignore[no-untyped-def]
        """Fill h at the times first, first + step, ... for every sequence; a job takes `span` floats of each row."""
        (a_start, a_batch, a_time), (b_start, b_batch, b_time), (h_start, h_batch, h_time) = a, b, h
        spans = (row + span - 1) // span
        ahead = step * max(1, _AHEAD // row)
        for job in prange(batch * spans):
            sequence, start = job // spans, (job % spans) * span
            stop = min(row, start + span)
            middle = start + (stop - start) // WIDTH * WIDTH
            a_at = a_start + size * (sequence * a_batch + first * a_time)
            b_at = b_start + size * (sequence * b_batch + first * b_time)
            at, before = h_start + size * (sequence * h_batch + first * h_time), h0 + size * sequence * row
            for _ in range(length):
                _recur(a_at, before, b_at, at, ahead * a_time, ahead * b_time, ahead * h_time, start, middle, wide)
                _recur(a_at, before, b_at, at, 0, 0, 0, middle, stop, narrow)
                before = at
                a_at, b_at, at = a_at + size * step * a_time, b_at + size * step * b_time, at + size * step * h_time

    return Kernel(forward)


def _make_backward(wide: Lanes, narrow: Lanes) -> Kernel:
    size = wide.n_bytes

    def backward(dh, a, h, h0, da, db, dh0, batch, length, row, span, last, step):  # type: ignore[no-untyped-def]
        """Fill da and db (addresses, laid out like h) and dh0, backwards from the time `last` by `step`."""
        (dh_start, dh_batch, dh_time), (a_start, a_batch, a_time), (h_start, h_batch, h_time) = dh, a, h
        spans = (row + span - 1) // span
        ahead = step * max(1, _AHEAD // row)
        for job in prange(batch * spans):
            sequence, start = job // spans, (job % spans) * span
            stop = min(row, start + span)
            middle = start + (stop - start) // WIDTH * WIDTH
            dh_at = dh_start + size * (sequence * dh_batch + last * dh_time)
            a_at = a_start + size * (sequence * a_batch + last * a_time)
            offset, entering = size * (sequence * h_batch + last * h_time), size * sequence * row
            for d in range(start, stop, width_of(narrow)):
                store(db + offset, d, narrow, load(dh_at, d, narrow))
            for _ in range(1, length):
                g, before = db + offset, offset + size * step * h_time
                _product(g, h_start + before, da + offset, ahead * h_time, ahead * h_time, start, middle, wide)
                _product(g, h_start + before, da + offset, 0, 0, middle, stop, narrow)
                dh_at += size * step * dh_time
                a_far, dh_far, h_far = ahead * a_time, ahead * dh_time, ahead * h_time
                _recur_back(a_at, g, dh_at, db + before, a_far, dh_far, h_far, start, middle, wide)
                _recur_back(a_at, g, dh_at, db + before, 0, 0, 0, middle, stop, narrow)
                a_at, offset = a_at + size * step * a_time, before
            _product(db + offset, h0 + entering, da + offset, 0, 0, start, middle, wide)
            _product(db + offset, h0 + entering, da + offset, 0, 0, middle, stop, narrow)
            _product(db + offset, a_at, dh0 + entering, 0, 0, start, middle, wide)
            _product(db + offset, a_at, dh0 + entering, 0, 0, middle, stop, narrow)

    return Kernel(backward)


@cache
def scan_kernels(number: str, is_complex: bool) -> KernelPair:
    """Return the kernels for "float32" or "float64", real or interleaved complex; they compile when first called."""
    lanes = Lanes(number, WIDTH, is_complex), Lanes(number, 2 if is_complex else 1, is_complex)
    return KernelPair(_make_forward(*lanes), _make_backward(*lanes))
