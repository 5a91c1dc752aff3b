"""A matrix times a few vectors on the CPU, as fast as memory delivers the matrix: y = scale (W x) + bias.

One step of a model uses each weight once for every row of a batch, so with few rows the time is that of reading the
weights, and they are read once for all rows. A thread takes neighbouring outputs from end to end.

bfloat16, int8 and int4 weights lie in panels (see `panels`) and are widened to float32 in registers. A panel is
multiplied in blocks of 128 inputs. With three tiles of vectors or more (see `tiles`), the first keeps the widened block
in the cache for the others. float32 weights stay in their rows (see `row_tiles`).

Sums are float32, and those of one vector are added up in one order, however many others are multiplied with it. Where
the machine can, a product and its sum are rounded once: widening keeps the machine busy, and for int8 saving that
operation saves a sixth of the time.
"""

from functools import cache

from numba import prange

from recurra.decoding.instructions import KINDS
from recurra.decoding.packed_vectors import load_halves, multiply_codes, weights_of_code, widen_codes
from recurra.decoding.panels import GROUP, GROUP_BYTES, PANEL
from recurra.decoding.row_tiles import AT_ONCE, ROWS, by_three, by_two, rest_by_three, rest_by_two
from recurra.decoding.tiles import (
    BFLOAT16_1,
    BFLOAT16_2,
    BFLOAT16_6,
    INT8_1,
    INT8_2,
    INT8_6,
    add_to,
    first_tile,
    number_of,
    one,
    other_tiles,
    tiles_of,
)
from recurra.decoding.vector_math import number
from recurra.kernels.launch import Kernel, compile_function, compile_inline
from recurra.kernels.vector import WIDTH, Lanes, load, multiply_add, prefetch, spread, store, total, zeros

BLOCK = 128
"""Inputs that are multiplied before the sums are put away: as float32, 64 outputs of them take 32 KB of the cache."""

_UNROLLED = 4 * WIDTH
_X_IN_CACHE = 16_384  # numbers of x: with up to these, two rows of float32 meet all vectors, and then the next two
_ROWS_IN_CACHE = 16  # with more, these rows meet three vectors, and then the next three
_LINE = 64  # bytes of a cache line
_AHEAD = 4096  # bytes: how far ahead of the walk weights are fetched
_FLOATS, _ONE, _WIDE = Lanes("float32", WIDTH), Lanes("float32", 1), Lanes("float32", PANEL)
_BYTES = Lanes("int8", PANEL)
_IS_FLOAT32, _IS_BFLOAT16, _IS_INT8 = KINDS["float32"], KINDS["bfloat16"], KINDS["int8"]


def room_bytes(vectors: int) -> int:
    """Give the room that a job needs for a product of this many vectors: a widened block, and sums."""
    return 4 * PANEL * (BLOCK + vectors)


# --- float32, in rows ---


@compile_inline
def _one_row(w, x, n_in):  # type: ignore[no-untyped-def]
    """Multiply a row by a vector."""
    s0, s1, s2, s3 = zeros(_FLOATS), zeros(_FLOATS), zeros(_FLOATS), zeros(_FLOATS)
    i = 0
    while i + _UNROLLED <= n_in:
        prefetch(w, i + _AHEAD // 4, _FLOATS)
        prefetch(w, i + _AHEAD // 4 + WIDTH, _FLOATS)
        prefetch(w, i + _AHEAD // 4 + 2 * WIDTH, _FLOATS)
        prefetch(w, i + _AHEAD // 4 + 3 * WIDTH, _FLOATS)
        s0 = multiply_add(load(w, i, _FLOATS), load(x, i, _FLOATS), s0)
        s1 = multiply_add(load(w, i + WIDTH, _FLOATS), load(x, i + WIDTH, _FLOATS), s1)
        s2 = multiply_add(load(w, i + 2 * WIDTH, _FLOATS), load(x, i + 2 * WIDTH, _FLOATS), s2)
        s3 = multiply_add(load(w, i + 3 * WIDTH, _FLOATS), load(x, i + 3 * WIDTH, _FLOATS), s3)
        i += _UNROLLED
    while i + WIDTH <= n_in:
        s0 = multiply_add(load(w, i, _FLOATS), load(x, i, _FLOATS), s0)
        i += WIDTH
    return total((s0 + s1) + (s2 + s3)) + _rest_of_row(w, x, i, n_in)


@compile_inline
def _rest_of_row(w, x, i, n_in):  # type: ignore[no-untyped-def]
    rest = zeros(_ONE)
    while i < n_in:
        rest = multiply_add(load(w, i, _ONE), load(x, i, _ONE), rest)
        i += 1
    return rest


@compile_inline
def _tile_of_rows(w, scale, bias, x, y, n_in, n_out, sums, first, vectors):  # type: ignore[no-untyped-def]
    """Multiply two rows, from row `first` at `w`, by two or three vectors.

    The sums (4, rows, vectors, 16) are those of `_one_row`.
    """
    pairs, whole = ROWS * vectors, n_in // _UNROLLED
    size, done, at = WIDTH * pairs, n_in // WIDTH * WIDTH, 4 * _UNROLLED * whole
    for i in range(4 * pairs):
        store(sums, WIDTH * i, _FLOATS, zeros(_FLOATS))
    for part in range(0, 4, AT_ONCE):
        w_at, x_at, sums_at = w + 4 * WIDTH * part, x + 4 * WIDTH * part, sums + 4 * size * part
        if vectors == 3:
            by_three(w_at, 4 * n_in, x_at, 4 * n_in, sums_at, whole)
        else:
            by_two(w_at, 4 * n_in, x_at, 4 * n_in, sums_at, whole)
    if vectors == 3:
        rest_by_three(w + at, 4 * n_in, x + at, 4 * n_in, sums, (done - _UNROLLED * whole) // WIDTH)
    else:
        rest_by_two(w + at, 4 * n_in, x + at, 4 * n_in, sums, (done - _UNROLLED * whole) // WIDTH)
    for row in range(ROWS):
        for vector in range(vectors):
            i = WIDTH * (row * vectors + vector)
            s0, s1 = load(sums, i, _FLOATS), load(sums, i + size, _FLOATS)
            s2, s3 = load(sums, i + 2 * size, _FLOATS), load(sums, i + 3 * size, _FLOATS)
            rest = _rest_of_row(w + 4 * row * n_in, x + 4 * vector * n_in, done, n_in)
            _put(total((s0 + s1) + (s2 + s3)) + rest, scale, bias, y, vector * n_out, first + row)


@compile_inline
def _put(product, scale, bias, y, start, row):  # type: ignore[no-untyped-def]
    store(y, start + row, _ONE, product * load(scale, row, _ONE) + load(bias, row, _ONE))


@compile_function
def _float32(w, scale, bias, x, y, vectors, n_in, n_out, first, last, room):  # type: ignore[no-untyped-def]
    """Fill outputs `first` to `last` of y (vectors, n_out)."""
    if vectors == 1:
        for row in range(first, last):
            _put(_one_row(w + 4 * row * n_in, x, n_in), scale, bias, y, 0, row)
        return
    rows = ROWS if vectors * n_in <= _X_IN_CACHE else _ROWS_IN_CACHE
    for start in range(first, last, rows):
        stop, vector = min(last, start + rows), 0
        while vector < vectors:
            together = 2 if vectors - vector == 2 or vectors - vector == 4 else 3
            x_at, y_at, row = x + 4 * vector * n_in, y + 4 * vector * n_out, start
            while row + ROWS <= stop:
                w_at = w + 4 * row * n_in
                if together == 3:
                    _tile_of_rows(w_at, scale, bias, x_at, y_at, n_in, n_out, room, row, 3)
                else:
                    _tile_of_rows(w_at, scale, bias, x_at, y_at, n_in, n_out, room, row, 2)
                row += ROWS
            while row < stop:
                for i in range(together):
                    _put(_one_row(w + 4 * row * n_in, x_at + 4 * i * n_in, n_in), scale, bias, y_at, i * n_out, row)
                row += 1
            vector += together


# --- in panels ---


@compile_inline
def _finish(sums, scale, bias, y, vectors, n_out, first):  # type: ignore[no-untyped-def]
    """Write a panel's outputs from its sums, and set these to zero."""
    last = min(n_out, first + PANEL)
    for vector in range(vectors):
        start, at = vector * n_out, PANEL * vector - first
        i = first
        while i + WIDTH <= last:
            product = load(sums, at + i, _FLOATS) * load(scale, i, _FLOATS)
            store(y, start + i, _FLOATS, product + load(bias, i, _FLOATS))
            i += WIDTH
        while i < last:
            _put(load(sums, at + i, _ONE), scale, bias, y, start, i)
            i += 1
        store(sums, PANEL * vector, _WIDE, zeros(_WIDE))


@compile_inline
def _step(size, vectors):  # type: ignore[no-untyped-def]
    """The bytes of the next block that each tile fetches for one input, so that all tiles together fetch all of it."""
    tiles = tiles_of(vectors)
    return (size + tiles - 1) // tiles


@compile_inline
def _in_panels(w, scale, bias, x, y, vectors, n_in, n_out, first, last, room, size, many, few, single):  # type: ignore[no-untyped-def]
    """Fill outputs `first` to `last`, where panels begin, from weights of `size` bytes."""
    sums, tiles, step = room + 4 * PANEL * BLOCK, tiles_of(vectors), _step(size * PANEL, vectors)
    for panel in range(first // PANEL, (last + PANEL - 1) // PANEL):
        for start in range(0, n_in, BLOCK):
            count, at, x_at = min(BLOCK, n_in - start), w + size * PANEL * (panel * n_in + start), x + 4 * start
            if vectors == 1:
                one(at, x_at, sums, count, _AHEAD // size, single)
                continue
            fetch, done, block = at + size * PANEL * count, 0, room if tiles > 2 else 0
            for _ in range(2 if tiles == 2 else 1):
                x_now, sums_now, left = x_at + 4 * done * n_in, sums + 4 * PANEL * done, vectors - done
                done += first_tile(at, x_now, n_in, sums_now, left, count, fetch, step, block, many, few, single)
                fetch += step * count
            if done < vectors:
                other_tiles(room, x_at, n_in, sums, done, vectors, count, fetch, step)
        _finish(sums, scale, bias, y, vectors, n_out, panel * PANEL)


@compile_function
def _bfloat16(w, scale, bias, x, y, vectors, n_in, n_out, first, last, room):  # type: ignore[no-untyped-def]
    lanes = BFLOAT16_6, BFLOAT16_2, BFLOAT16_1
    _in_panels(w, scale, bias, x, y, vectors, n_in, n_out, first, last, room, 2, lanes[0], lanes[1], lanes[2])


@compile_function
def _int8(w, scale, bias, x, y, vectors, n_in, n_out, first, last, room):  # type: ignore[no-untyped-def]
    _in_panels(w, scale, bias, x, y, vectors, n_in, n_out, first, last, room, 1, INT8_6, INT8_2, INT8_1)


@compile_inline
def _steps_and_low(w):  # type: ignore[no-untyped-def]
    """Give a group's scales and minima, for codes that are read as 1 + code / 16."""
    steps = load_halves(w, _WIDE) * spread(number(16, _ONE), _WIDE)
    return steps, load_halves(w + 2 * PANEL, _WIDE) - steps


@compile_inline
def _one_of_int4(w, x, sums, count):  # type: ignore[no-untyped-def]
    """Multiply groups of int4 by one vector."""
    s, k = zeros(_WIDE), 0
    while k < count:
        for line in range(0, 4 * PANEL, _LINE):
            prefetch(w, _AHEAD + line, _BYTES)
        steps, low = _steps_and_low(w)
        words, stop = w + 4 * PANEL, min(k + GROUP, count)
        while k + 8 <= stop:
            for line in range(0, 4 * PANEL, _LINE):
                prefetch(words, _AHEAD + line, _BYTES)
            s = multiply_codes(words, steps, low, x + 4 * k, s)
            k, words = k + 8, words + 4 * PANEL
        for at in range(stop - k):
            s = multiply_add(weights_of_code(words, at, steps, low), number_of(x, k + at, _WIDE), s)
        k, w = stop, w + GROUP_BYTES
    add_to(sums, 0, s, _WIDE)


@compile_inline
def _widen_int4(w, block, count):  # type: ignore[no-untyped-def]
    for k in range(0, count, GROUP):
        steps, low = _steps_and_low(w)
        words, stop = w + 4 * PANEL, min(k + GROUP, count)
        for at in range(k, stop, 8):  # with inputs that may not be there: the block has room for them
            widen_codes(words, steps, low, block + 4 * PANEL * at)
            words += 4 * PANEL
        w += GROUP_BYTES


@compile_function
def _int4(w, scale, bias, x, y, vectors, n_in, n_out, first, last, room):  # type: ignore[no-untyped-def]
    """Fill outputs `first` to `last`, where panels begin."""
    sums, groups = room + 4 * PANEL * BLOCK, (n_in + GROUP - 1) // GROUP
    step = _step(GROUP_BYTES // GROUP, vectors)
    for panel in range(first // PANEL, (last + PANEL - 1) // PANEL):
        for start in range(0, n_in, BLOCK):
            count, at = min(BLOCK, n_in - start), w + GROUP_BYTES * (panel * groups + start // GROUP)
            if vectors == 1:
                _one_of_int4(at, x + 4 * start, sums, count)
            else:
                _widen_int4(at, room, count)
                other_tiles(room, x + 4 * start, n_in, sums, 0, vectors, count, at + GROUP_BYTES * BLOCK // GROUP, step)
        _finish(sums, scale, bias, y, vectors, n_out, panel * PANEL)


# --- all ---


@compile_function
def multiply_share(kind, w, scale, bias, x, y, vectors, n_in, n_out, room, room_size, job, jobs):  # type: ignore[no-untyped-def]
    """Fill the share of one of `jobs` jobs in y (vectors, n_out); `room` is zeros, `room_size` bytes for every job."""
    unit = 1 if kind == _IS_FLOAT32 else PANEL
    units = (n_out + unit - 1) // unit
    first, last, room = (
        unit * (units * job // jobs),
        min(n_out, unit * (units * (job + 1) // jobs)),
        room + room_size * job,
    )
    if kind == _IS_FLOAT32:
        _float32(w, scale, bias, x, y, vectors, n_in, n_out, first, last, room)
    elif kind == _IS_BFLOAT16:
        _bfloat16(w, scale, bias, x, y, vectors, n_in, n_out, first, last, room)
    elif kind == _IS_INT8:
        _int8(w, scale, bias, x, y, vectors, n_in, n_out, first, last, room)
    else:
        _int4(w, scale, bias, x, y, vectors, n_in, n_out, first, last, room)


@cache
def matvec_kernel() -> Kernel:
    """Return the kernel for weights of every kind in `KINDS`."""

    def multiply(kind, w, scale, bias, x, y, vectors, n_in, n_out, room, room_size, jobs):  # type: ignore[no-untyped-def]
        """Fill y (vectors, n_out) from w and x (vectors, n_in), addresses."""
        for job in prange(jobs):
            multiply_share(kind, w, scale, bias, x, y, vectors, n_in, n_out, room, room_size, job, jobs)

    return Kernel(multiply)
