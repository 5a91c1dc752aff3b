"""The linear recurrence on the CPU, as fast as the memory: kernels for wide rows, wide rows of halves, and narrow rows.

    forward   h_t = a_t h_{t-1} + b_t
    backward  g_t = dh_t + conj(a_{t+1}) g_{t+1};  db_t = g_t;  da_t = g_t conj(h_{t-1});  dh_0 = conj(a_1) g_1

A tensor is passed as (address, batch stride, time stride), with its channels next to each other. Strides and rows
count floats, so a row of D complex channels is 2 D wide.
"""

from functools import cache

from recurra.ops._toolkit.launch import Kernel, KernelPair, compile_inline
from recurra.ops._toolkit.vectors import WIDTH, Lanes, conjugate, load, prefetch, store, width_of

# Wide rows.
# A job walks over time through whole rows (all channels of a step): only along such streams does the hardware fetch
# ahead. The state needs no registers: the row written last is still in the first-level cache. If there are fewer
# sequences than threads, jobs split the rows.


_AHEAD = 2048  # floats: how far ahead of the walk rows are prefetched


@compile_inline
def part_of_job(job, row, span):  # type: ignore[no-untyped-def]
    """Return the sequence of a job and its part of a row: the start, the end of the full vectors, and the end."""
    spans = (row + span - 1) // span
    start = job % spans * span
    stop = min(row, start + span)
    return job // spans, start, start + (stop - start) // WIDTH * WIDTH, stop


@compile_inline
def _recur(a, x, b, out, a_ahead, b_ahead, out_ahead, start, stop, lanes, is_back):  # type: ignore[no-untyped-def]
    """out = a x + b over a part of a row, or conj(a) x + b; prefetches the same part of later rows."""
    for d in range(start, stop, width_of(lanes)):
        prefetch(a, d + a_ahead, lanes)
        prefetch(b, d + b_ahead, lanes)
        prefetch(out, d + out_ahead, lanes)
        a_d = load(a, d, lanes)
        store(out, d, lanes, (conjugate(a_d) if is_back else a_d) * load(x, d, lanes) + load(b, d, lanes))


@compile_inline
def _product(g, x, out, x_ahead, out_ahead, start, stop, lanes):  # type: ignore[no-untyped-def]
    """out = g conj(x) over a part of a row."""
    for d in range(start, stop, width_of(lanes)):
        prefetch(x, d + x_ahead, lanes)
        prefetch(out, d + out_ahead, lanes)
        store(out, d, lanes, load(g, d, lanes) * conjugate(load(x, d, lanes)))


def _make_forward(wide: Lanes, narrow: Lanes) -> Kernel:
    size = wide.n_bytes

    def forward(a, b, h0, h, batch, length, row, span, first, step, share):  # type: ignore[no-untyped-def]
        """Fill h at the times first, first + step, ... for every sequence; a job takes `span` floats of each row."""
        (a_start, a_batch, a_time), (b_start, b_batch, b_time), (h_start, h_batch, h_time) = a, b, h
        ahead = step * max(1, _AHEAD // row)
        for job in range(share[0], share[1]):
            sequence, start, middle, stop = part_of_job(job, row, span)
            a_at = a_start + size * (sequence * a_batch + first * a_time)
            b_at = b_start + size * (sequence * b_batch + first * b_time)
            at, before = h_start + size * (sequence * h_batch + first * h_time), h0 + size * sequence * row
            for _ in range(length):
                a_far, b_far, h_far = ahead * a_time, ahead * b_time, ahead * h_time
                _recur(a_at, before, b_at, at, a_far, b_far, h_far, start, middle, wide, False)
                _recur(a_at, before, b_at, at, 0, 0, 0, middle, stop, narrow, False)
                before = at
                a_at, b_at, at = a_at + size * step * a_time, b_at + size * step * b_time, at + size * step * h_time

    return Kernel(forward)


def _make_backward(wide: Lanes, narrow: Lanes) -> Kernel:
    size = wide.n_bytes

    def backward(dh, a, h, h0, da, db, dh0, batch, length, row, span, last, step, share):  # type: ignore[no-untyped-def]
        """Fill da and db (addresses, laid out like h) and dh0, backwards from the time `last` by `step`."""
        (dh_start, dh_batch, dh_time), (a_start, a_batch, a_time), (h_start, h_batch, h_time) = dh, a, h
        ahead = step * max(1, _AHEAD // row)
        for job in range(share[0], share[1]):
            sequence, start, middle, stop = part_of_job(job, row, span)
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
                _recur(a_at, g, dh_at, db + before, a_far, dh_far, h_far, start, middle, wide, True)
                _recur(a_at, g, dh_at, db + before, 0, 0, 0, middle, stop, narrow, True)
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


# Wide rows of halves, float16 or bfloat16, computed in float32.
# What runs through the steps must not be rounded, so it lies in float32 beside the halves: the states in the forward
# pass, all of them or, with a time stride of 0, the current one alone; their gradient g in the backward pass.


@compile_inline
def _recur_halves(a, x, b, h, out, a_ahead, b_ahead, h_ahead, out_ahead, start, stop, halves, lanes):  # type: ignore[no-untyped-def]
    """h = a x + b over a part of a row, and out, which is h rounded; prefetches the same part of later rows."""
    for d in range(start, stop, width_of(lanes)):
        prefetch(a, d + a_ahead, halves)
        prefetch(b, d + b_ahead, halves)
        prefetch(h, d + h_ahead, lanes)
        prefetch(out, d + out_ahead, halves)
        state = load(a, d, halves) * load(x, d, lanes) + load(b, d, halves)
        store(h, d, lanes, state)
        store(out, d, halves, state)


@compile_inline
def _recur_halves_back(g, a, h, dh, da, db, a_ahead, h_ahead, dh_ahead, start, stop, halves, lanes):  # type: ignore[no-untyped-def]
    """db = g and da = g h, rounded, then g = a g + dh, over a part of a row; prefetches the same part of later rows."""
    for d in range(start, stop, width_of(lanes)):
        prefetch(a, d + a_ahead, halves)
        prefetch(h, d + h_ahead, lanes)
        prefetch(dh, d + dh_ahead, halves)
        prefetch(da, d + h_ahead, halves)
        prefetch(db, d + h_ahead, halves)
        g_d = load(g, d, lanes)
        store(db, d, halves, g_d)
        store(da, d, halves, g_d * load(h, d, lanes))
        store(g, d, lanes, load(a, d, halves) * g_d + load(dh, d, halves))


@compile_inline
def _finish_halves(g, a, h0, da, db, start, stop, halves, lanes):  # type: ignore[no-untyped-def]
    """The same for the first step, before which there is no other: g = a g."""
    for d in range(start, stop, width_of(lanes)):
        g_d = load(g, d, lanes)
        store(db, d, halves, g_d)
        store(da, d, halves, g_d * load(h0, d, lanes))
        store(g, d, lanes, load(a, d, halves) * g_d)


def _make_halves_forward(halves: Lanes, wide: Lanes, half: Lanes, narrow: Lanes) -> Kernel:
    small, size = halves.n_bytes, wide.n_bytes

    def forward(a, b, h0, h, out, batch, length, row, span, first, step, share):  # type: ignore[no-untyped-def]
        """Fill h (float32) and out at the times first, first + step, ...; a job takes `span` floats of each row."""
        (a_start, a_batch, a_time), (b_start, b_batch, b_time), (h_start, h_batch, h_time) = a, b, h
        out_start, out_batch, out_time = out
        ahead = step * max(1, _AHEAD // row)
        for job in range(share[0], share[1]):
            sequence, start, middle, stop = part_of_job(job, row, span)
            a_at = a_start + small * (sequence * a_batch + first * a_time)
            b_at = b_start + small * (sequence * b_batch + first * b_time)
            out_at = out_start + small * (sequence * out_batch + first * out_time)
            at, before = h_start + size * (sequence * h_batch + first * h_time), h0 + size * sequence * row
            for _ in range(length):
                far = ahead * a_time, ahead * b_time, ahead * h_time, ahead * out_time
                _recur_halves(a_at, before, b_at, at, out_at, *far, start, middle, halves, wide)
                _recur_halves(a_at, before, b_at, at, out_at, 0, 0, 0, 0, middle, stop, half, narrow)
                before, at = at, at + size * step * h_time
                a_at, b_at = a_at + small * step * a_time, b_at + small * step * b_time
                out_at += small * step * out_time

    return Kernel(forward)


def _make_halves_backward(halves: Lanes, wide: Lanes, half: Lanes, narrow: Lanes) -> Kernel:
    small, size = halves.n_bytes, wide.n_bytes

    def backward(dh, a, h, h0, da, db, dh0, batch, length, row, span, last, step, share):  # type: ignore[no-untyped-def]
        """Fill da and db (addresses, laid out like h) and dh0, backwards from the time `last` by `step`.

        h, h0 and dh0 are float32; dh0 holds g on the way.
        """
        (dh_start, dh_batch, dh_time), (a_start, a_batch, a_time), (h_start, h_batch, h_time) = dh, a, h
        ahead = step * max(1, _AHEAD // row)
        for job in range(share[0], share[1]):
            sequence, start, middle, stop = part_of_job(job, row, span)
            dh_at = dh_start + small * (sequence * dh_batch + last * dh_time)
            a_at = a_start + small * (sequence * a_batch + last * a_time)
            place, entering = sequence * h_batch + last * h_time, size * sequence * row
            g = dh0 + entering
            for d in range(start, stop, width_of(narrow)):
                store(g, d, narrow, load(dh_at, d, half))
            far = ahead * a_time, ahead * h_time, ahead * dh_time
            for _ in range(1, length):
                before = h_start + size * (place + step * h_time)
                dh_at += small * step * dh_time
                da_at, db_at = da + small * place, db + small * place
                _recur_halves_back(g, a_at, before, dh_at, da_at, db_at, *far, start, middle, halves, wide)
                _recur_halves_back(g, a_at, before, dh_at, da_at, db_at, 0, 0, 0, middle, stop, half, narrow)
                a_at, place = a_at + small * step * a_time, place + step * h_time
            da_at, db_at = da + small * place, db + small * place
            _finish_halves(g, a_at, h0 + entering, da_at, db_at, start, middle, halves, wide)
            _finish_halves(g, a_at, h0 + entering, da_at, db_at, middle, stop, half, narrow)

    return Kernel(backward)


@cache
def half_kernels(number: str) -> KernelPair:
    """Return the kernels for "float16" or "bfloat16", for rows that are not narrow."""
    lanes = Lanes(number, WIDTH), Lanes("float32", WIDTH), Lanes(number, 1), Lanes("float32", 1)
    return KernelPair(_make_halves_forward(*lanes), _make_halves_backward(*lanes))


# Narrow rows: the state of a whole row stays in registers.
# Reading back a row of a few numbers takes longer than all the arithmetic of a step (it waits for the store), and most
# of a wide vector would be empty. Here a row is two vectors of width W, the largest power of two below the row's
# length: one starts where the row starts, the other ends where it ends. Where they overlap, both compute and store the
# same numbers. Arguments, operations and results are those of the kernels for wide rows; `span` is the row.


WIDEST_ROW = 63  # floats; wider rows are as fast or faster with the state in the cache


def vector_width(row: int, is_complex: bool) -> int:
    """Return the width of the two vectors that cover a row of `row` floats: at least half of it."""
    return max(2 if is_complex else 1, 1 << ((row - 1).bit_length() - 1) if row > 1 else 1)


def _make_narrow_forward(lanes: Lanes) -> Kernel:
    size, width = lanes.n_bytes, lanes.width

    def forward(a, b, h0, h, batch, length, row, span, first, step, share):  # type: ignore[no-untyped-def]
        """Fill h at the times first, first + step, ... for every sequence."""
        (a_start, a_batch, a_time), (b_start, b_batch, b_time), (h_start, h_batch, h_time) = a, b, h
        end, ahead = row - width, step * max(1, _AHEAD // row)
        for sequence in range(share[0], share[1]):
            a_at = a_start + size * (sequence * a_batch + first * a_time)
            b_at = b_start + size * (sequence * b_batch + first * b_time)
            at, entering = h_start + size * (sequence * h_batch + first * h_time), h0 + size * sequence * row
            left, right = load(entering, 0, lanes), load(entering, end, lanes)
            for _ in range(length):
                prefetch(a_at, ahead * a_time, lanes)
                prefetch(b_at, ahead * b_time, lanes)
                prefetch(at, ahead * h_time, lanes)
                left = load(a_at, 0, lanes) * left + load(b_at, 0, lanes)
                right = load(a_at, end, lanes) * right + load(b_at, end, lanes)
                store(at, 0, lanes, left)
                store(at, end, lanes, right)
                a_at, b_at, at = a_at + size * step * a_time, b_at + size * step * b_time, at + size * step * h_time

    return Kernel(forward)


def _make_narrow_backward(lanes: Lanes) -> Kernel:
    size, width = lanes.n_bytes, lanes.width

    def backward(dh, a, h, h0, da, db, dh0, batch, length, row, span, last, step, share):  # type: ignore[no-untyped-def]
        """Fill da and db (addresses, laid out like h) and dh0, backwards from the time `last` by `step`."""
        (dh_start, dh_batch, dh_time), (a_start, a_batch, a_time), (h_start, h_batch, h_time) = dh, a, h
        end, ahead = row - width, step * max(1, _AHEAD // row)
        for sequence in range(share[0], share[1]):
            dh_at = dh_start + size * (sequence * dh_batch + last * dh_time)
            a_at = a_start + size * (sequence * a_batch + last * a_time)
            offset, entering = size * (sequence * h_batch + last * h_time), size * sequence * row
            left, right = load(dh_at, 0, lanes), load(dh_at, end, lanes)
            for _ in range(1, length):
                before = offset + size * step * h_time
                prefetch(a_at, ahead * a_time, lanes)
                prefetch(dh_at, ahead * dh_time, lanes)
                prefetch(h_start + before, ahead * h_time, lanes)
                prefetch(da + offset, ahead * h_time, lanes)
                prefetch(db + offset, ahead * h_time, lanes)
                store(db + offset, 0, lanes, left)
                store(db + offset, end, lanes, right)
                store(da + offset, 0, lanes, left * conjugate(load(h_start + before, 0, lanes)))
                store(da + offset, end, lanes, right * conjugate(load(h_start + before, end, lanes)))
                dh_at += size * step * dh_time
                left = conjugate(load(a_at, 0, lanes)) * left + load(dh_at, 0, lanes)
                right = conjugate(load(a_at, end, lanes)) * right + load(dh_at, end, lanes)
                a_at, offset = a_at + size * step * a_time, before
            store(db + offset, 0, lanes, left)
            store(db + offset, end, lanes, right)
            store(da + offset, 0, lanes, left * conjugate(load(h0 + entering, 0, lanes)))
            store(da + offset, end, lanes, right * conjugate(load(h0 + entering, end, lanes)))
            store(dh0 + entering, 0, lanes, left * conjugate(load(a_at, 0, lanes)))
            store(dh0 + entering, end, lanes, right * conjugate(load(a_at, end, lanes)))

    return Kernel(backward)


@cache
def narrow_kernels(number: str, width: int, is_complex: bool) -> KernelPair:
    """Return the kernels for "float32" or "float64", real or interleaved complex, in vectors of `width` floats."""
    lanes = Lanes(number, width, is_complex)
    return KernelPair(_make_narrow_forward(lanes), _make_narrow_backward(lanes))
