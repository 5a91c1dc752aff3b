"""The inner loops of products of bfloat16, int8 and int4 weights: many outputs of a few vectors, sums in registers."""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from recurra.decoding._instructions import FUNCTIONS, LIGHT
from recurra.decoding._products import (
    GROUP_SUMS,
    PAIR_BYTES,
    QUAD_BYTES,
    SCALE,
    START,
    WORDS,
    all_of,
    halves,
    pair_products,
    prepared,
    prepared_pair,
    products,
    spread_number,
)
from recurra.decoding.linear import GROUP, GROUP_BYTES, PANEL
from recurra.ops._toolkit.vector_math import write
from recurra.ops._toolkit.vectors import WIDTH, Lanes, Vector, fetch

# --- what a compiled step does with the short float32 vectors of `recurra.ops._toolkit.vectors` ---


@intrinsic
def apply(typing_context: Any, code: Any, x: Any, y: Any) -> Any:
    """Give function number `code` (see `instructions.FUNCTIONS`) of float32 vectors x and, if it takes two, y.

    Vectors longer than a register are for light functions only: the others need the registers themselves.
    """
    if not (isinstance(x, Vector) and x == y and not x.is_double and not x.is_complex):
        return None

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        end, unknown = builder.append_basic_block("applied"), builder.append_basic_block("unknown")
        switch = builder.switch(args[0], unknown)
        results = []
        for number, name in enumerate(FUNCTIONS if x.width <= WIDTH else LIGHT):
            block = builder.append_basic_block(name)
            switch.add_case(ir.Constant(args[0].type, number), block)
            builder.position_at_end(block)
            results.append((write(name, builder, args[1], args[2]), builder.block))
            builder.branch(end)
        builder.position_at_end(unknown)
        builder.unreachable()
        builder.position_at_end(end)
        value = builder.phi(x.ir)
        for result, block in results:
            value.add_incoming(result, block)
        return value

    return x(types.int64, x, y), generate


def _multiplied(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """Write x y + z of vectors."""
    return write("multiply_add", builder, x, y, z)


@intrinsic
def root(typing_context: Any, x: Any) -> Any:
    """Give the square roots of a real vector's numbers."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return write("sqrt", builder, args[0])

    return x(x), generate


@intrinsic
def quotient(typing_context: Any, x: Any, y: Any) -> Any:
    """Divide one real vector by another of its kind."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return builder.fdiv(*args)

    return x(x, y), generate


@intrinsic
def number(typing_context: Any, value: Any, lanes: Any) -> Any:
    """Turn an integer into a one-element vector; `lanes` have a width of 1."""
    kind = Vector(lanes.lanes)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        one = builder.sitofp(args[0], kind.ir.element)
        return builder.insert_element(ir.Constant(kind.ir, ir.Undefined), one, ir.IntType(32)(0))

    return kind(types.int64, lanes), generate


@intrinsic
def gather(typing_context: Any, address: Any, stride: Any, lanes: Any) -> Any:
    """Load float32 numbers that lie `stride` bytes apart into one vector."""
    kind: Lanes = lanes.lanes

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        at, value = args[0], ir.Constant(Vector(kind).ir, ir.Undefined)
        for lane in range(kind.width):
            one = builder.load(builder.inttoptr(at, ir.FloatType().as_pointer()), align=4)
            value = builder.insert_element(value, one, ir.IntType(32)(lane))
            at = builder.add(at, args[1])
        return value

    return Vector(kind)(types.int64, types.int64, lanes), generate


@intrinsic
def scatter(typing_context: Any, address: Any, stride: Any, lanes: Any, vector: Any) -> Any:
    """Write a float32 vector's numbers `stride` bytes apart."""
    kind: Lanes = lanes.lanes

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        at = args[0]
        for lane in range(kind.width):
            one = builder.extract_element(args[3], ir.IntType(32)(lane))
            builder.store(one, builder.inttoptr(at, ir.FloatType().as_pointer()), align=4)
            at = builder.add(at, args[1])

    return types.void(types.int64, types.int64, lanes, vector), generate


@intrinsic
def word(typing_context: Any, address: Any, index: Any) -> Any:
    """Load the int64 that lies `index` int64s after `address`."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        at = builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, 8)))
        return builder.load(builder.inttoptr(at, ir.IntType(64).as_pointer()), align=8)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def real(typing_context: Any, address: Any, index: Any) -> Any:
    """Load the float32 that lies `index` float32s after `address`."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        at = builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, 4)))
        return builder.load(builder.inttoptr(at, ir.FloatType().as_pointer()), align=4)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def set_word(typing_context: Any, address: Any, value: Any) -> Any:
    """Write an int64."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        builder.store(args[1], builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=8)

    return types.void(types.int64, types.int64), generate


# --- tiles: 64 outputs of a few vectors at once, their sums in registers ---
#
# A weight is loaded once for all vectors of a tile. The products of a block of 128 inputs, or in int4 of a group of
# 32, are added up in registers, whole numbers are scaled, and the sums of a block are added to `sums` (vectors, 64),
# float32. So a vector's sums are added in one order, whichever tile it is in.
#
# With the 32 registers of AVX-512 a tile has the sums of 6 vectors and 64 outputs in flight (in int4, which has two
# sums of each, 32 outputs, twice over), with fewer registers those of 16 outputs, four times over.


def has_wide_registers() -> bool:
    """Tell whether kernels are compiled for 32 registers of 16 floats."""
    chosen = numba.config.CPU_FEATURES
    if chosen is None and numba.config.CPU_NAME is None:
        return bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
    return "+avx512f" in (chosen or "")


_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, WIDTH)
_COLUMNS = PANEL // WIDTH if has_wide_registers() else 1
"""Groups of 16 outputs at once."""
_QUAD = 4 * PANEL  # bytes: 2 bfloat16 weights of each output of a panel, 4 of int8 or 8 of int4
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
    return spread_number(builder, _read(builder, address, _FLOAT), _FLOATS)


def _add(builder: ir.IRBuilder, sums: ir.Value, at: int, factors: ir.Value, numbers: ir.Value) -> None:
    """Add factors times numbers to the sums from number `at` on."""
    place = builder.inttoptr(_at(builder, sums, 4 * at), _FLOATS.as_pointer())
    builder.store(_multiplied(builder, factors, numbers, builder.load(place, align=4)), place, align=4)


def _tile(generate: Callable[..., None], n_vectors: int, **options: int) -> Callable[..., None]:
    @intrinsic
    def multiply(typing_context: Any, w: Any, x: Any, x_step: Any, sums: Any, count: Any, ahead: Any) -> Any:
        """Multiply `count` pairs (bfloat16), quads (int8) or groups (int4) from w on by what `round_inputs` made.

        The inputs of each vector lie `x_step` bytes after those of the one before.
        """

        def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
            w_, x_, x_step_, *rest = args
            vectors = [_at(builder, x_, _times(builder, x_step_, i)) for i in range(n_vectors)]
            generate(builder, vectors, w_, *rest, **options)

        return types.void(*[types.int64] * 6), lower

    return multiply


def _lines(
    builder: ir.IRBuilder,
    vectors: list[ir.Value],
    w: ir.Value,
    sums: ir.Value,
    count: ir.Value,
    ahead: ir.Value,
    n_lines: int,
    is_int8: bool,
) -> None:
    """Multiply int8 or bfloat16, and fetch 4, 2 (every second) or 1 of the cache lines of every quad or pair."""
    size, step = QUAD_BYTES if is_int8 else PAIR_BYTES, _LINE if n_lines == 1 else _QUAD
    columns = max(_COLUMNS, PANEL // WIDTH // len(vectors))  # of one or two vectors, more sums fit
    for first in range(0, PANEL // WIDTH, columns):
        held = []
        for vector in vectors:
            start = all_of(_FLOATS, 0.0)
            if is_int8:
                start = spread_number(builder, _read(builder, _at(builder, vector, START), ir.IntType(32)), WORDS)
            held.append([cgutils.alloca_once_value(builder, start) for _ in range(columns)])
        with cgutils.for_range(builder, count) as loop:
            for line in range(0 if first else n_lines):
                far = _at(builder, _times(builder, loop.index, step), step // n_lines * line)
                fetch(builder, _at(builder, ahead, far))
            row_at = _at(builder, w, _times(builder, loop.index, _QUAD))
            words = [_read(builder, _at(builder, row_at, 4 * WIDTH * (first + c)), WORDS) for c in range(columns)]
            weights = [prepared(builder, word, True) if is_int8 else prepared_pair(builder, word) for word in words]
            multiply = products if is_int8 else pair_products
            for vector, row in zip(vectors, held):
                inputs = _at(builder, vector, _times(builder, loop.index, size))
                for part, place in zip(weights, row):
                    builder.store(multiply(builder, builder.load(place), part, inputs), place)
        for number, (vector, row) in enumerate(zip(vectors, held)):
            scale = _same(builder, _at(builder, vector, SCALE)) if is_int8 else all_of(_FLOATS, 1.0)
            for column, place in enumerate(row):
                value = builder.load(place)
                value = builder.sitofp(value, _FLOATS) if is_int8 else value
                _add(builder, sums, PANEL * number + WIDTH * (first + column), scale, value)


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
    columns = min(_COLUMNS, 2 if len(vectors) > _UNROLLED else _COLUMNS)
    for first in range(0, PANEL // WIDTH, columns):
        held = [[cgutils.alloca_once_value(builder, all_of(_FLOATS, 0.0)) for _ in range(columns)] for _ in vectors]
        with cgutils.for_range(builder, count) as loop:
            group = _at(builder, w, _times(builder, loop.index, GROUP_BYTES))
            for line in range(0, 0 if first or not fetches else GROUP_BYTES, _LINE):
                fetch(builder, _at(builder, ahead, _at(builder, _times(builder, loop.index, GROUP_BYTES), line)))
            totals = _group_products(builder, vectors, group, loop.index, first, columns)
            starts = [2 * WIDTH * (first + c) for c in range(columns)]
            steps = [halves(builder, _at(builder, group, at), WIDTH) for at in starts]
            lows = [halves(builder, _at(builder, group, 2 * PANEL + at), WIDTH) for at in starts]
            for vector, row, places in zip(vectors, totals, held):
                inputs = _same(builder, _at(builder, _at(builder, vector, GROUP_SUMS), _times(builder, loop.index, 4)))
                for step, low, whole, place in zip(steps, lows, row, places):
                    value = _multiplied(builder, low, inputs, builder.load(place))
                    builder.store(_multiplied(builder, step, builder.sitofp(whole, _FLOATS), value), place)
        for number, (vector, row) in enumerate(zip(vectors, held)):
            scale = _same(builder, _at(builder, vector, SCALE))
            for column, place in enumerate(row):
                _add(builder, sums, PANEL * number + WIDTH * (first + column), scale, builder.load(place))


def _group_products(
    builder: ir.IRBuilder, vectors: list[ir.Value], group: ir.Value, index: ir.Value, first: int, columns: int
) -> list[list[ir.Value]]:
    """The sums of codes times inputs of a group, for each vector and column."""
    held = [[cgutils.alloca_once_value(builder, all_of(WORDS, 0)) for _ in range(columns)] for _ in vectors]
    starts = [_at(builder, vector, _times(builder, index, GROUP // 4 * QUAD_BYTES)) for vector in vectors]
    low, four, words = all_of(WORDS, 0x0F0F0F0F), all_of(WORDS, 4), ir.Constant(index.type, GROUP // 8)

    def add(at: ir.Value) -> None:
        row = _at(builder, group, _at(builder, _times(builder, at, _QUAD), 4 * PANEL + 4 * WIDTH * first))
        inputs = [_at(builder, start, _times(builder, at, 2 * QUAD_BYTES)) for start in starts]
        for column in range(columns):
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


def _tiles(generate: Callable[..., None], counts: tuple[int, ...], **options: int) -> tuple[Callable[..., None], ...]:
    return tuple(_tile(generate, count, **options) for count in counts)


_COUNTS = 6, 4, 2, 1
int8_six, int8_four, int8_two, int8_one = _tiles(_lines, _COUNTS, n_lines=4, is_int8=True)
bfloat16_six, bfloat16_four, bfloat16_two, bfloat16_one = _tiles(_lines, _COUNTS, n_lines=2, is_int8=False)
int8_six_of_many, bfloat16_six_of_many = (_tile(_lines, 6, n_lines=1, is_int8=which) for which in (True, False))
int4_six, int4_four = _tiles(_int4, (6, 4), fetches=1)
int4_six_more, int4_four_more = _tiles(_int4, (6, 4), fetches=0)
int4_two, int4_one = _tiles(_int4, (2, 1), fetches=0)  # fetched by the processor: 0.8 of the time on a Zen 4
