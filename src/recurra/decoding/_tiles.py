"""The inner loops of products of bfloat16 and whole-number weights: many outputs of a few vectors, their sums in
registers.
"""

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
    QUAD_BYTES,
    SCALE,
    SIGNED_OFFSET,
    SUM,
    WORDS,
    all_of,
    halves,
    prepared,
    products,
    spread_number,
)
from recurra.decoding.linear import GROUP, GROUP_BYTES, PANEL
from recurra.ops._toolkit.launch import compile_function, compile_inline
from recurra.ops._toolkit.vector_math import write
from recurra.ops._toolkit.vectors import WIDTH, Lanes, Vector, fetch, load, multiply_add, prefetch, spread, store, zeros

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
def set_word(typing_context: Any, address: Any, value: Any) -> Any:
    """Write an int64."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        builder.store(args[1], builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=8)

    return types.void(types.int64, types.int64), generate


# --- tiles of bfloat16 weights: 64 outputs of a few vectors at once, their sums in registers ---
#
# A block of weights is (inputs, 64): those of one input for 64 neighbouring outputs lie side by side, and each is
# multiplied by one number of every vector. So a weight is loaded and widened once for all vectors of a tile, and a
# sum runs through the inputs in order, whichever tile it is in. A tile adds its sums to `sums` (vectors, 64).
#
# A tile has as many sums as registers hold: 6 vectors of 64 outputs in 24 of the 32 registers of AVX-512, of 16
# outputs in 12 of the 16 of AVX2.


def has_wide_registers() -> bool:
    """Tell whether kernels are compiled for 32 registers of 16 floats."""
    chosen = numba.config.CPU_FEATURES
    if chosen is None and numba.config.CPU_NAME is None:
        return bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
    return "+avx512f" in (chosen or "")


_SIX = PANEL if has_wide_registers() else WIDTH
_TWO = PANEL if has_wide_registers() else 2 * WIDTH
_ONE, _FLOATS = Lanes("float32", 1), Lanes("float32", PANEL)
_SUMS_6, _SUMS_2 = Lanes("float32", _SIX), Lanes("float32", _TWO)
FLOAT32_6, FLOAT32_2, FLOAT32_1 = _SUMS_6, _SUMS_2, _FLOATS
BFLOAT16_6, BFLOAT16_2, BFLOAT16_1 = (Lanes("bfloat16", width) for width in (_SIX, _TWO, PANEL))


@compile_inline
def _number_of(x, k, lanes):  # type: ignore[no-untyped-def]
    """Give number k of a vector in all lanes."""
    return spread(load(x, k, _ONE), lanes)


@compile_inline
def _add_to(sums, at, more, lanes):  # type: ignore[no-untyped-def]
    """Add a vector to the sums from number `at` on."""
    store(sums, at, lanes, load(sums, at, lanes) + more)


@compile_inline
def _six(w, x, n_in, sums, count, fetch, step, block, weights):  # type: ignore[no-untyped-def]
    """Multiply `count` inputs of a block by 6 vectors, and keep the widened weights in `block`, unless that is 0."""
    x1, x2, x3, x4, x5 = x + 4 * n_in, x + 8 * n_in, x + 12 * n_in, x + 16 * n_in, x + 20 * n_in
    for part in range(0, PANEL, _SIX):
        s0, s1, s2 = zeros(_SUMS_6), zeros(_SUMS_6), zeros(_SUMS_6)
        s3, s4, s5 = zeros(_SUMS_6), zeros(_SUMS_6), zeros(_SUMS_6)
        for k in range(count):
            prefetch(fetch + step * k, 0, _FLOATS)
            w_k = load(w, PANEL * k + part, weights)
            if block:
                store(block, PANEL * k + part, _SUMS_6, w_k)
            s0 = multiply_add(w_k, _number_of(x, k, _SUMS_6), s0)
            s1 = multiply_add(w_k, _number_of(x1, k, _SUMS_6), s1)
            s2 = multiply_add(w_k, _number_of(x2, k, _SUMS_6), s2)
            s3 = multiply_add(w_k, _number_of(x3, k, _SUMS_6), s3)
            s4 = multiply_add(w_k, _number_of(x4, k, _SUMS_6), s4)
            s5 = multiply_add(w_k, _number_of(x5, k, _SUMS_6), s5)
        _add_to(sums, part, s0, _SUMS_6), _add_to(sums, part + PANEL, s1, _SUMS_6)
        _add_to(sums, part + 2 * PANEL, s2, _SUMS_6), _add_to(sums, part + 3 * PANEL, s3, _SUMS_6)
        _add_to(sums, part + 4 * PANEL, s4, _SUMS_6), _add_to(sums, part + 5 * PANEL, s5, _SUMS_6)


@compile_inline
def _four(w, x, n_in, sums, count, fetch, step, weights):  # type: ignore[no-untyped-def]
    """Do the same for 4 vectors, without keeping the weights."""
    x1, x2, x3 = x + 4 * n_in, x + 8 * n_in, x + 12 * n_in
    for part in range(0, PANEL, _SIX):
        s0, s1, s2, s3 = zeros(_SUMS_6), zeros(_SUMS_6), zeros(_SUMS_6), zeros(_SUMS_6)
        for k in range(count):
            prefetch(fetch + step * k, 0, _FLOATS)
            w_k = load(w, PANEL * k + part, weights)
            s0 = multiply_add(w_k, _number_of(x, k, _SUMS_6), s0)
            s1 = multiply_add(w_k, _number_of(x1, k, _SUMS_6), s1)
            s2 = multiply_add(w_k, _number_of(x2, k, _SUMS_6), s2)
            s3 = multiply_add(w_k, _number_of(x3, k, _SUMS_6), s3)
        _add_to(sums, part, s0, _SUMS_6), _add_to(sums, part + PANEL, s1, _SUMS_6)
        _add_to(sums, part + 2 * PANEL, s2, _SUMS_6), _add_to(sums, part + 3 * PANEL, s3, _SUMS_6)


@compile_inline
def _two(w, x, n_in, sums, count, fetch, step, weights):  # type: ignore[no-untyped-def]
    """Do the same for 2 vectors, without keeping the weights."""
    x1 = x + 4 * n_in
    for part in range(0, PANEL, _TWO):
        s0, s1 = zeros(_SUMS_2), zeros(_SUMS_2)
        for k in range(count):
            prefetch(fetch + step * k, 0, _FLOATS)
            w_k = load(w, PANEL * k + part, weights)
            s0 = multiply_add(w_k, _number_of(x, k, _SUMS_2), s0)
            s1 = multiply_add(w_k, _number_of(x1, k, _SUMS_2), s1)
        _add_to(sums, part, s0, _SUMS_2), _add_to(sums, part + PANEL, s1, _SUMS_2)


@compile_inline
def one(w, x, sums, count, ahead, weights):  # type: ignore[no-untyped-def]
    """Multiply by one vector; `ahead` is how far ahead of the walk weights are fetched."""
    s = zeros(_FLOATS)
    for k in range(count):
        prefetch(w, PANEL * k + ahead, weights)
        s = multiply_add(load(w, PANEL * k, weights), _number_of(x, k, _FLOATS), s)
    _add_to(sums, 0, s, _FLOATS)


@compile_inline
def tiles_of(vectors):  # type: ignore[no-untyped-def]
    """How many tiles this many vectors take."""
    return (vectors + 5) // 6 + (1 if vectors % 6 == 3 or vectors % 6 == 5 else 0)


@compile_function
def first_tile(w, x, n_in, sums, vectors, count, fetch, step, block, many, few, single):  # type: ignore[no-untyped-def]
    """Multiply packed weights by as many of the vectors as fit into a tile, and give that number."""
    if vectors >= 6 and vectors != 8:  # twice 4 rather than 6 and 2
        _six(w, x, n_in, sums, count, fetch, step, block, many)
        return 6
    if vectors >= 4:
        _four(w, x, n_in, sums, count, fetch, step, many)
        return 4
    if vectors >= 2:
        _two(w, x, n_in, sums, count, fetch, step, few)
        return 2
    one(w, x, sums, count, 0, single)
    return 1


@compile_function
def other_tiles(block, x, n_in, sums, done, vectors, count, fetch, step):  # type: ignore[no-untyped-def]
    """Multiply a block of float32 by all vectors from number `done` on."""
    while done < vectors:
        left, x_at, sums_at = vectors - done, x + 4 * done * n_in, sums + 4 * PANEL * done
        if left >= 6 and left != 8:
            _six(block, x_at, n_in, sums_at, count, fetch, step, 0, FLOAT32_6)
            done += 6
        elif left >= 4:
            _four(block, x_at, n_in, sums_at, count, fetch, step, FLOAT32_6)
            done += 4
        elif left >= 2:
            _two(block, x_at, n_in, sums_at, count, fetch, step, FLOAT32_2)
            done += 2
        else:
            one(block, x_at, sums_at, count, 0, FLOAT32_1)
            done += 1
        fetch += step * count


# --- tiles of whole numbers ---
#
# A weight is loaded once for all vectors of a tile. The products of a block of 128 inputs, or in int4 of a group of
# 32, are whole numbers, which are scaled; those of a block are added to `sums` (vectors, 64), float32. With the 32
# registers of AVX-512 a tile has the sums of 6 vectors and 64 outputs in flight (of 4 in int4, which has two sums of
# each), with fewer registers those of 16 outputs, four times over.


_FLOAT = ir.FloatType()
_BYTE_TILES_FLOATS = ir.VectorType(_FLOAT, WIDTH)
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
    return spread_number(builder, _read(builder, address, _FLOAT), _BYTE_TILES_FLOATS)


def _add(builder: ir.IRBuilder, sums: ir.Value, at: int, factors: ir.Value, numbers: ir.Value) -> None:
    """Add factors times numbers to the sums from number `at` on."""
    place = builder.inttoptr(_at(builder, sums, 4 * at), _BYTE_TILES_FLOATS.as_pointer())
    builder.store(_multiplied(builder, factors, numbers, builder.load(place, align=4)), place, align=4)


def _tile(generate: Callable[..., None], n_vectors: int, **options: int) -> Callable[..., None]:
    @intrinsic
    def multiply(typing_context: Any, w: Any, x: Any, x_step: Any, sums: Any, count: Any, ahead: Any) -> Any:
        """Multiply `count` quads (int8) or groups (int4) from w on by the records at x, `x_step` bytes apart."""

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
            offset = builder.fmul(_same(builder, _at(builder, vector, SUM)), all_of(_BYTE_TILES_FLOATS, SIGNED_OFFSET))
            for column, place in enumerate(row):
                whole = builder.fsub(builder.sitofp(builder.load(place), _BYTE_TILES_FLOATS), offset)
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
        held = [
            [cgutils.alloca_once_value(builder, all_of(_BYTE_TILES_FLOATS, 0.0)) for _ in range(_COLUMNS)]
            for _ in vectors
        ]
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
                    value = _multiplied(builder, low, inputs, builder.load(place))
                    builder.store(_multiplied(builder, step, builder.sitofp(whole, _BYTE_TILES_FLOATS), value), place)
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
