"""The inner loop of a product of float32 weights in rows: two rows times a few vectors, their sums in registers.

A row times a vector has four sums of 16 numbers. With the 32 registers of AVX-512 a tile has all
of them in flight, for two rows and three vectors; with the 16 of AVX2 it comes to the same sums one after the other.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from recurra.decoding._instructions import KINDS
from recurra.decoding._products import PAIRS_RECORD, RECORD, round_inputs, round_to_pairs
from recurra.decoding._tiles import (
    BFLOAT16,
    EXPANDED_BYTES,
    INT8,
    expand,
    expanded_four,
    expanded_six,
    int4_one,
    int4_two,
)
from recurra.decoding.linear import BLOCK, BLOCK_BYTES, PAIR, PANEL, QUAD
from recurra.ops._toolkit.launch import Apart, Kernel, call, compile_inline, compile_part
from recurra.ops._toolkit.vector_math import write
from recurra.ops._toolkit.vectors import (
    WIDTH,
    Lanes,
    Vector,
    compiles_for,
    fetch,
    load,
    multiply_add,
    prefetch,
    store,
    total,
    zeros,
)

ROWS, AT_ONCE = 2, 4 if compiles_for("avx512f") else 1
"""Rows of a tile, and how many of the four sums it has in flight."""


def _tile(n_vectors: int, is_rest: bool = False) -> Callable[..., None]:
    """Make the intrinsic for this many vectors, and for whole 64 numbers of a row or for the rest of it."""

    @intrinsic
    def multiply(typing_context: Any, w: Any, w_step: Any, x: Any, x_step: Any, sums: Any, count: Any) -> Any:
        """Add to `sums` (sums in flight, rows, vectors, 16): `count` times 64 numbers of each row and vector."""

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
            _generate(builder, n_vectors, *((1, 1) if is_rest else (AT_ONCE, 4)), args)

        return types.void(*[types.int64] * 6), generate

    return multiply


def _generate(builder: ir.IRBuilder, n_vectors: int, in_flight: int, stride: int, args: tuple) -> None:
    w, w_step, x, x_step, sums, count = args
    kind, n_bytes = Vector(Lanes("float32", WIDTH)).ir, 4 * WIDTH
    w_at, x_at = _places(builder, w, w_step, 2 * ROWS), _places(builder, x, x_step, n_vectors)
    sums_at = _places(builder, sums, ir.Constant(sums.type, n_bytes), in_flight * ROWS * n_vectors)
    held = [cgutils.alloca_once_value(builder, _load(builder, at)) for at in sums_at]  # registers, to LLVM
    with cgutils.for_range(builder, count) as loop:
        for number in range(in_flight):
            offset = builder.mul(loop.index, ir.Constant(loop.index.type, n_bytes * stride))
            offset = builder.add(offset, ir.Constant(loop.index.type, n_bytes * number))
            numbers = [_load(builder, builder.add(at, offset)) for at in x_at]
            for row in range(ROWS):
                weights = _load(builder, builder.add(w_at[row], offset))
                fetch(builder, builder.add(w_at[row + ROWS], offset))
                for vector, factor in enumerate(numbers):
                    place = held[(number * ROWS + row) * n_vectors + vector]
                    builder.store(write("multiply_add", builder, weights, factor, builder.load(place)), place)
    for at, place in zip(sums_at, held):
        builder.store(builder.load(place), builder.inttoptr(at, kind.as_pointer()), align=4)


def _places(builder: ir.IRBuilder, start: ir.Value, step: ir.Value, count: int) -> list[ir.Value]:
    return [builder.add(start, builder.mul(step, ir.Constant(step.type, i))) for i in range(count)]


def _load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    kind = Vector(Lanes("float32", WIDTH)).ir
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


by_three, by_two, rest_by_three, rest_by_two = _tile(3), _tile(2), _tile(3, True), _tile(2, True)


# --- a matrix times a few vectors on the CPU, as fast as memory delivers the matrix: y = scale (W x) + bias ---
#
# One step of a model uses each weight once for every row of a batch, so with few rows the time is that of reading the
# weights, and they are read once for all rows. A thread takes neighbouring outputs from end to end.
#
# All but float32 weights lie in panels (see `linear`), and are multiplied by inputs that are rounded first: to
# bfloat16, or for int8 and int4 to whole numbers. All tiles of vectors meet a block of 128 inputs of a panel (see
# `tiles`), and then the next block, which they fetch. float32 weights stay in their rows.
#
# The sums of one vector are added up in one order, however many others are multiplied with it.


_UNROLLED = 4 * WIDTH
_X_IN_CACHE = 16_384  # numbers of x: with up to these, two rows of float32 meet all vectors, and then the next two
_ROWS_IN_CACHE = 16  # with more, these rows meet three vectors, and then the next three
_LINE = 64  # bytes of a cache line
_AHEAD = 4096  # bytes: how far ahead of the walk weights are fetched
_FLOATS, _ONE, _WIDE = Lanes("float32", WIDTH), Lanes("float32", 1), Lanes("float32", PANEL)
_ROW_SUMS = 4 * WIDTH * 4 * ROWS * 3
_MANY = 18  # vectors: with more, the first tiles share the fetching of the next block


def room_bytes(vectors: int, n_in: int) -> int:
    """Give the room that a job needs for products of up to this many vectors of up to `n_in` numbers.

    It holds the sums of a panel, a block of int4 expanded to int8, and last the sums of rows or
    the rounded inputs of the latest product.
    """
    blocks = (n_in + BLOCK - 1) // BLOCK
    return 4 * PANEL * vectors + EXPANDED_BYTES + max(_ROW_SUMS, max(RECORD, PAIRS_RECORD) * blocks * vectors)


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
    """Multiply two rows, from row `first` at `w`, by two or three vectors."""
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


@compile_part
def _float32(w, scale, bias, x, y, vectors, n_in, n_out, first, last, end):  # type: ignore[no-untyped-def]
    """Fill outputs `first` to `last` of y (vectors, n_out)."""
    room = end - _ROW_SUMS
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


@compile_inline
def _finish(sums, scale, bias, y, vectors, n_out, first):  # type: ignore[no-untyped-def]
    """Write a panel's outputs from its sums."""
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


def _tiles_of(six_of_many: Any, six: Any, four: Any, two: Any, one: Any) -> Any:
    """Make what multiplies `count` pairs (bfloat16) or quads (int8) by the records of all vectors."""

    def multiply(w, x, x_step, sums, vectors, count, ahead):  # type: ignore[no-untyped-def]
        done = 0
        while done < vectors:
            left, x_at, sums_at = vectors - done, x + x_step * done, sums + 4 * PANEL * done
            if left >= 6 and left != 8:  # twice 4 rather than 6 and 2
                if vectors > _MANY:
                    six_of_many(w, x_at, x_step, sums_at, count, ahead + _LINE * count * min(done // 6, 3))
                else:
                    six(w, x_at, x_step, sums_at, count, ahead)
                done += 6
            elif left >= 4:
                four(w, x_at, x_step, sums_at, count, ahead)
                done += 4
            elif left >= 2:
                two(w, x_at, x_step, sums_at, count, ahead)
                done += 2
            else:
                one(w, x_at, x_step, sums_at, count, ahead)
                done += 1

    return compile_part(multiply)


@compile_part
def _tiles_of_int4(w, x, x_step, sums, vectors, count, ahead):  # type: ignore[no-untyped-def]
    """Multiply a block by the records of all vectors."""
    done, expanded = 0, sums + 4 * PANEL * vectors
    if vectors >= 4:
        expand(w, expanded, ahead)
    while done < vectors:
        left, x_at, sums_at = vectors - done, x + x_step * done, sums + 4 * PANEL * done
        if left >= 6 and left != 8:
            expanded_six(expanded, x_at, x_step, sums_at, BLOCK // QUAD, ahead)
            done += 6
        elif left >= 4:
            expanded_four(expanded, x_at, x_step, sums_at, BLOCK // QUAD, ahead)
            done += 4
        elif left >= 2:
            int4_two(w, x_at, x_step, sums_at, count, ahead)
            done += 2
        else:
            int4_one(w, x_at, x_step, sums_at, count, ahead)
            done += 1


def _panels(rounded: Any, tiles: Any, length: int, size: int, record: int) -> Any:
    """Make the product with panels in which `length` inputs lie together, in `size` bytes of a panel."""

    def multiply(w, scale, bias, x, y, vectors, n_in, n_out, part):  # type: ignore[no-untyped-def]
        """Fill a part of the outputs, which begins where a panel does."""
        first, last, sums, end = part
        blocks, parts = (n_in + BLOCK - 1) // BLOCK, (n_in + length - 1) // length
        step = record * blocks
        records = end - step * vectors
        rounded(x, n_in, vectors, records)
        for panel in range(first // PANEL, (last + PANEL - 1) // PANEL):
            for vector in range(vectors):
                store(sums, PANEL * vector, _WIDE, zeros(_WIDE))
            for block in range(blocks):
                done = block * (BLOCK // length)
                count, at = min(BLOCK // length, parts - done), w + size * (panel * parts + done)
                ahead = at + (_AHEAD if vectors == 1 else size * count)
                tiles(at, records + record * block, step, sums, vectors, count, ahead)
            _finish(sums, scale, bias, y, vectors, n_out, panel * PANEL)

    return compile_part(multiply)


_bfloat16 = _panels(round_to_pairs, _tiles_of(*BFLOAT16), PAIR, 2 * PAIR * PANEL, PAIRS_RECORD)
_int8 = _panels(round_inputs, _tiles_of(*INT8), QUAD, QUAD * PANEL, RECORD)
_int4 = _panels(round_inputs, _tiles_of_int4, BLOCK, BLOCK_BYTES, RECORD)


@compile_inline
def _part(unit, n_out, room, room_size, job, jobs):  # type: ignore[no-untyped-def]
    """Give the first and the last output of a job, and where the room begins and ends."""
    units = (n_out + unit - 1) // unit
    return unit * (units * job // jobs), min(n_out, unit * (units * (job + 1) // jobs)), room, room + room_size


# each fills the share of one of `jobs` jobs in y (vectors, n_out); `room` has `room_size` bytes


def _share_of_float32(w, scale, bias, x, y, vectors, n_in, n_out, room, room_size, job, jobs):  # type: ignore[no-untyped-def]
    first, last, _, end = _part(1, n_out, room, room_size, job, jobs)
    _float32(w, scale, bias, x, y, vectors, n_in, n_out, first, last, end)
    return 0


def _share_of_bfloat16(w, scale, bias, x, y, vectors, n_in, n_out, room, room_size, job, jobs):  # type: ignore[no-untyped-def]
    _bfloat16(w, scale, bias, x, y, vectors, n_in, n_out, _part(PANEL, n_out, room, room_size, job, jobs))
    return 0


def _share_of_int8(w, scale, bias, x, y, vectors, n_in, n_out, room, room_size, job, jobs):  # type: ignore[no-untyped-def]
    _int8(w, scale, bias, x, y, vectors, n_in, n_out, _part(PANEL, n_out, room, room_size, job, jobs))
    return 0


def _share_of_int4(w, scale, bias, x, y, vectors, n_in, n_out, room, room_size, job, jobs):  # type: ignore[no-untyped-def]
    _int4(w, scale, bias, x, y, vectors, n_in, n_out, _part(PANEL, n_out, room, room_size, job, jobs))
    return 0


multiply_share = {
    KINDS["float32"]: Apart(_share_of_float32),
    KINDS["bfloat16"]: Apart(_share_of_bfloat16),
    KINDS["int8"]: Apart(_share_of_int8),
    KINDS["int4"]: Apart(_share_of_int4),
}
"""Products by kind of weights, apart so that only those in use are compiled."""


@cache
def matvec_kernel() -> Kernel:
    """Return the kernel for all kinds of weights; `address` is that of one of `multiply_share`."""

    def multiply(address, w, scale, bias, x, y, vectors, n_in, n_out, room, room_size, jobs, share):  # type: ignore[no-untyped-def]
        """Fill y (vectors, n_out) from w and x (vectors, n_in), addresses."""
        for job in range(share[0], share[1]):
            own = room + room_size * job
            call(address, (w, scale, bias, x, y, vectors, n_in, n_out, own, room_size, job, jobs))

    return Kernel(multiply)
