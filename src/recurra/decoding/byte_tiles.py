"""The inner loops of a product of whole numbers: 64 outputs of a few vectors at once, their sums in registers.

A weight is loaded once for all vectors of a tile. The products of a block of 128 inputs, or in int4 of a group of 32,
are whole numbers, which are scaled; those of a block are added to `sums` (vectors, 64), float32. With the 32 registers
of AVX-512 a tile has the sums of 6 vectors and 64 outputs in flight (of 4 in int4, which has two sums of each), with
fewer registers those of 16 outputs, four times over.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from recurra.decoding.byte_products import QUAD_BYTES, SIGNED_OFFSET, WORDS, all_of, prepared, products, spread
from recurra.decoding.halves import halves
from recurra.decoding.panels import GROUP, GROUP_BYTES, PANEL
from recurra.decoding.rounded_inputs import GROUP_SUMS, SCALE, SUM
from recurra.decoding.tiles import has_wide_registers
from recurra.decoding.vector_math import multiplied
from recurra.kernels.vector import WIDTH, fetch

_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, WIDTH)
_COLUMNS = PANEL // WIDTH if has_wide_registers() else 1
"""Groups of 16 outputs at once."""
_QUAD = 4 * PANEL  # bytes: 4 int8 weights of each output of a panel, or 8 of int4
_LINE = 64
_UNROLLED = 2  # vectors: with up to these, a group of int4 is unrolled


def _at(builder: ir.IRBuilder, start: ir.Value, offset: int | ir.Value) -> ir.Value:
    return builder.add(start, ir.Constant(start.type, offset) if isinstance(offset, int) else offset)


def _times(builder: ir.IRBuilder, value: ir.Value, factor: int) -> ir.Value:
    return builder.mul(value, ir.Constant(value.type, factor))


def _read(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def _same(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """A float32 in all places of a vector."""
    return spread(builder, _read(builder, address, _FLOAT), _FLOATS)


def _add(builder: ir.IRBuilder, sums: ir.Value, at: int, factors: ir.Value, numbers: ir.Value) -> None:
    """Add factors times numbers to the sums from number `at` on."""
    place = builder.inttoptr(_at(builder, sums, 4 * at), _FLOATS.as_pointer())
    builder.store(multiplied(builder, factors, numbers, builder.load(place, align=4)), place, align=4)


def _tile(generate: Callable[..., None], n_vectors: int, **options: int) -> Callable[..., None]:
    @intrinsic
    def multiply(typing_context: Any, w: Any, x: Any, x_step: Any, sums: Any, count: Any, ahead: Any) -> Any:
        """Multiply `count` quads (int8) or groups (int4) from w on by the records at x, `x_step` bytes apart.

        Meanwhile memory from `ahead` on is fetched.
        """

        def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
            w_, x_, x_step_, *rest = args
            vectors = [_at(builder, x_, _times(builder, x_step_, i)) for i in range(n_vectors)]
            generate(builder, vectors, w_, *rest, **options)

        return types.void(*[types.int64] * 6), lower

    return multiply


def _int8(
    builder: ir.IRBuilder,
    vectors: list[ir.Value],
    w: ir.Value,
    sums: ir.Value,
    count: ir.Value,
    ahead: ir.Value,
    n_lines: int,
) -> None:
    """Fetch `n_lines` cache lines for every quad."""
    for first in range(0, PANEL // WIDTH, _COLUMNS):
        held = [[cgutils.alloca_once_value(builder, all_of(WORDS, 0)) for _ in range(_COLUMNS)] for _ in vectors]
        with cgutils.for_range(builder, count) as loop:
            for line in range(0 if first else n_lines):
                far = _at(builder, _times(builder, loop.index, _LINE * n_lines), _LINE * line)
                fetch(builder, _at(builder, ahead, far))
            row_at = _at(builder, w, _times(builder, loop.index, _QUAD))
            words = [_read(builder, _at(builder, row_at, 4 * WIDTH * (first + c)), WORDS) for c in range(_COLUMNS)]
            weights = [prepared(builder, word, True) for word in words]
            for vector, row in zip(vectors, held):
                inputs = _at(builder, vector, _times(builder, loop.index, QUAD_BYTES))
                for part, place in zip(weights, row):
                    builder.store(products(builder, builder.load(place), part, inputs), place)
        for number, (vector, row) in enumerate(zip(vectors, held)):
            scale = _same(builder, _at(builder, vector, SCALE))
            offset = builder.fmul(_same(builder, _at(builder, vector, SUM)), all_of(_FLOATS, SIGNED_OFFSET))
            for column, place in enumerate(row):
                whole = builder.fsub(builder.sitofp(builder.load(place), _FLOATS), offset)
                _add(builder, sums, PANEL * number + WIDTH * (first + column), scale, whole)


def _int4(
    builder: ir.IRBuilder,
    vectors: list[ir.Value],
    w: ir.Value,
    sums: ir.Value,
    count: ir.Value,
    ahead: ir.Value,
    fetches: int,
) -> None:
    """Fetch as many bytes as are read, unless `fetches` is 0."""
    for first in range(0, PANEL // WIDTH, _COLUMNS):
        held = [[cgutils.alloca_once_value(builder, all_of(_FLOATS, 0.0)) for _ in range(_COLUMNS)] for _ in vectors]
        with cgutils.for_range(builder, count) as loop:
            group = _at(builder, w, _times(builder, loop.index, GROUP_BYTES))
            for line in range(0, 0 if first or not fetches else GROUP_BYTES, _LINE):
                fetch(builder, _at(builder, ahead, _at(builder, _times(builder, loop.index, GROUP_BYTES), line)))
            totals = _group_products(builder, vectors, group, loop.index, first)
            starts = [2 * WIDTH * (first + c) for c in range(_COLUMNS)]
            steps = [halves(builder, _at(builder, group, at), WIDTH) for at in starts]
            lows = [halves(builder, _at(builder, group, 2 * PANEL + at), WIDTH) for at in starts]
            for vector, row, places in zip(vectors, totals, held):
                inputs = _same(builder, _at(builder, _at(builder, vector, GROUP_SUMS), _times(builder, loop.index, 4)))
                for step, low, whole, place in zip(steps, lows, row, places):
                    value = multiplied(builder, low, inputs, builder.load(place))
                    builder.store(multiplied(builder, step, builder.sitofp(whole, _FLOATS), value), place)
        for number, (vector, row) in enumerate(zip(vectors, held)):
            scale = _same(builder, _at(builder, vector, SCALE))
            for column, place in enumerate(row):
                _add(builder, sums, PANEL * number + WIDTH * (first + column), scale, builder.load(place))


def _group_products(
    builder: ir.IRBuilder, vectors: list[ir.Value], group: ir.Value, index: ir.Value, first: int
) -> list[list[ir.Value]]:
    """The sums of codes times inputs of a group, for each vector and column."""
    held = [[cgutils.alloca_once_value(builder, all_of(WORDS, 0)) for _ in range(_COLUMNS)] for _ in vectors]
    starts = [_at(builder, vector, _times(builder, index, GROUP // 4 * QUAD_BYTES)) for vector in vectors]
    low, four, words = all_of(WORDS, 0x0F0F0F0F), all_of(WORDS, 4), ir.Constant(index.type, GROUP // 8)

    def add(at: ir.Value) -> None:
        row = _at(builder, group, _at(builder, _times(builder, at, _QUAD), 4 * PANEL + 4 * WIDTH * first))
        inputs = [_at(builder, start, _times(builder, at, 2 * QUAD_BYTES)) for start in starts]
        for column in range(_COLUMNS):
            codes = _read(builder, _at(builder, row, 4 * WIDTH * column), WORDS)
            for half, part in enumerate((codes, builder.lshr(codes, four))):
                weights = prepared(builder, builder.and_(part, low), False)
                for place, at_ in zip((row[column] for row in held), inputs):
                    value = products(builder, builder.load(place), weights, _at(builder, at_, QUAD_BYTES * half))
                    builder.store(value, place)

    if len(vectors) <= _UNROLLED:
        for number in range(GROUP // 8):
            add(ir.Constant(index.type, number))
    else:  # LLVM would take long, and run out of registers
        with cgutils.for_range(builder, words) as loop:
            add(loop.index)
    return [[builder.load(place) for place in row] for row in held]


int8_six, int8_six_of_many = _tile(_int8, 6, n_lines=4), _tile(_int8, 6, n_lines=1)
int8_four, int8_two, int8_one = (_tile(_int8, count, n_lines=4) for count in (4, 2, 1))
int4_four, int4_four_more = _tile(_int4, 4, fetches=1), _tile(_int4, 4, fetches=0)
int4_two, int4_one = (_tile(_int4, count, fetches=1) for count in (2, 1))
