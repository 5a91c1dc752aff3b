"""The inner loops of products of bfloat16, int8 and int4 weights: many outputs of a few vectors, sums in registers."""

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from recurra.decoding._instructions import FUNCTIONS, LIGHT
from recurra.decoding._products import (
    BYTES,
    GROUP_SUMS,
    HALVES,
    PAIR_BYTES,
    QUAD_BYTES,
    SCALE,
    START,
    WORDS,
    add_pairs,
    add_scaled,
    code_products,
    halves_of,
    offset,
    pair_products,
    prepared,
    prepared_pair,
    products,
)
from recurra.decoding.linear import BLOCK, GROUP, PANEL
from recurra.ops._toolkit.vector_math import write
from recurra.ops._toolkit.vectors import WIDTH, Lanes, Vector, all_of, compiles_for, fetch, shuffle, spread_number

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
def stream(typing_context: Any, address: Any, vector: Any) -> Any:
    """Write a vector past the caches, to a multiple of 64 bytes; a `fence` must follow before others read it."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        at = builder.inttoptr(args[0], args[1].type.as_pointer())
        stored = builder.store(args[1], at, align=_LINE)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))

    return types.void(types.int64, vector), generate


@intrinsic
def fence(typing_context: Any) -> Any:
    """Let earlier accesses of memory end before later ones begin."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        builder.fence("seq_cst")

    return types.void(), generate


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
# A weight is loaded once for all vectors of a tile. The products of a block of 128 inputs are added up in registers,
# whole numbers are scaled, and the sums of a block are added to `sums` (vectors, 64), float32. So a vector's sums are
# added in one order, whichever tile it is in. int4 weights become int8: in registers for up to three vectors, and for
# more in memory, once for all tiles.
#
# With the 32 registers of AVX-512 a tile has the sums of 6 vectors and 64 outputs in flight, with fewer registers those
# of 16 outputs, four times over.


_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, WIDTH)
_COLUMNS = PANEL // WIDTH if compiles_for("avx512f") else 1
"""Groups of 16 outputs at once."""
_QUAD = 4 * PANEL  # bytes: 2 bfloat16 weights of each output of a panel, 4 of int8 or 8 of int4
_LINE = 64
_EXPANDED = BLOCK * PANEL  # bytes: a block of int8
EXPANDED_BYTES = _EXPANDED + 4 * PANEL
"""Room that `expand` needs."""


def _at(builder: ir.IRBuilder, start: ir.Value, offset: int | ir.Value) -> ir.Value:
    return builder.add(start, ir.Constant(start.type, offset) if isinstance(offset, int) else offset)


def _times(builder: ir.IRBuilder, value: ir.Value, factor: int) -> ir.Value:
    return builder.mul(value, ir.Constant(value.type, factor))


def _read(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def _same(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """A float32 in all places of a vector."""
    return spread_number(builder, _read(builder, address, _FLOAT), _FLOATS)


def _tile(generate: Callable[..., None], n_vectors: int, **options: Any) -> Callable[..., None]:
    @intrinsic
    def multiply(typing_context: Any, w: Any, x: Any, x_step: Any, sums: Any, count: Any, ahead: Any) -> Any:
        """Multiply `count` pairs (bfloat16) or quads (int8), or a block of int4, from w on by the rounded inputs.

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
    dtype: str,
) -> None:
    """Multiply int8, bfloat16 or what `expand` wrote, and fetch 4, 2, 1 or no cache lines of every quad or pair."""
    is_pairs = dtype == "bfloat16"
    size, step = PAIR_BYTES if is_pairs else QUAD_BYTES, _LINE if n_lines == 1 else _QUAD
    columns = max(_COLUMNS, PANEL // WIDTH // len(vectors))  # of one or two vectors, more sums fit
    for first in range(0, PANEL // WIDTH, columns):
        held = [_sums(builder, vector, columns, is_pairs) for vector in vectors]
        with cgutils.for_range(builder, count) as loop:
            for line in range(0 if first else n_lines):
                far = _at(builder, _times(builder, loop.index, step), step // n_lines * line)
                fetch(builder, _at(builder, ahead, far))
            row_at = _at(builder, w, _times(builder, loop.index, _QUAD))
            words = [_read(builder, _at(builder, row_at, 4 * WIDTH * (first + c)), WORDS) for c in range(columns)]
            words = [offset(builder, word) for word in words] if dtype == "int8" else words
            weights = [prepared_pair(builder, word) if is_pairs else prepared(builder, word) for word in words]
            multiply = pair_products if is_pairs else products
            for vector, row in zip(vectors, held):
                inputs = _at(builder, vector, _times(builder, loop.index, size))
                for part, place in zip(weights, row):
                    builder.store(multiply(builder, builder.load(place), part, inputs), place)
        factors = _columns(builder, w, _EXPANDED, first, columns if dtype == "expanded" else 0)
        factors = [_read(builder, at, _FLOATS) for at in factors]
        for number, (vector, row) in enumerate(zip(vectors, held)):
            values = [builder.load(place) for place in row]
            at = _at(builder, sums, 4 * (PANEL * number + WIDTH * first))
            _finish(builder, vector, values, factors, at, is_pairs)


def _columns(builder: ir.IRBuilder, start: ir.Value, at: int, first: int, count: int) -> list[ir.Value]:
    """Return the addresses of some groups of 16 outputs; the panel's words begin at an address plus an offset."""
    return [_at(builder, start, at + 4 * WIDTH * (first + column)) for column in range(count)]


def _sums(builder: ir.IRBuilder, vector: ir.Value, columns: int, is_pairs: bool = False) -> list[ir.Value]:
    """Registers, to LLVM, for sums of float32 or whole numbers."""
    start = all_of(_FLOATS, 0.0)
    if not is_pairs:
        start = spread_number(builder, _read(builder, _at(builder, vector, START), ir.IntType(32)), WORDS)
    return [cgutils.alloca_once_value(builder, start) for _ in range(columns)]


def _finish(
    builder: ir.IRBuilder,
    vector: ir.Value,
    values: list[ir.Value],
    factors: list[ir.Value],
    sums: ir.Value,
    is_pairs: bool = False,
) -> None:
    """Add a block's sums, scaled, to those of the panel."""
    scale = all_of(_FLOATS, 1.0) if is_pairs else _same(builder, _at(builder, vector, SCALE))
    for column, value in enumerate(values):
        value = value if is_pairs else builder.sitofp(value, _FLOATS)
        factor = builder.fmul(scale, factors[column]) if factors else scale
        at = builder.inttoptr(_at(builder, sums, 4 * WIDTH * column), _FLOATS.as_pointer())
        builder.store(write("multiply_add", builder, factor, value, builder.load(at, align=4)), at, align=4)


def _int4(
    builder: ir.IRBuilder,
    vectors: list[ir.Value],
    w: ir.Value,
    sums: ir.Value,
    count: ir.Value,
    ahead: ir.Value,
) -> None:
    """Multiply one block as it is stored: minima by the groups' sums, and each group's codes and then their step."""
    for first in range(0, PANEL // WIDTH, _COLUMNS):
        for row in (0, 1):
            _fetch_row(builder, ahead, row, first)
        minima, heads = _heads(builder, w, first, _COLUMNS)
        halves = [halves_of(builder, word) for word in minima]
        held = [[_of_minima(builder, part, vector) for part in halves] for vector in vectors]
        for group in range(BLOCK // GROUP):
            parts: list[list[ir.Value | None]] = [[None] * _COLUMNS for _ in vectors]
            for quad, column, codes in _codes(builder, w, first, _COLUMNS, group):
                if quad % 2 == column == 0:
                    _fetch_row(builder, ahead, 2 + quad // 2, first)
                for vector, sums_of in zip(vectors, parts):
                    sums_of[column] = code_products(builder, sums_of[column], codes, vector, quad)
            steps = [_steps(builder, word, group) for word in heads]
            held = [[add_scaled(builder, *three) for three in zip(row, part, steps)] for row, part in zip(held, parts)]
        factors = [_factors(builder, word) for word in heads]
        for number, (vector, values) in enumerate(zip(vectors, held)):
            _finish(builder, vector, values, factors, _at(builder, sums, 4 * (PANEL * number + WIDTH * first)))


def _fetch_row(builder: ir.IRBuilder, ahead: ir.Value, row: int, first: int) -> None:
    """Prefetch some columns of a row; with AVX-512, the processor alone takes 0.8 of the time."""
    if not compiles_for("avx512f"):
        for at in _columns(builder, ahead, _QUAD * row, first, _COLUMNS):
            fetch(builder, at)


def _of_minima(builder: ir.IRBuilder, halves: list[ir.Value], vector: ir.Value) -> ir.Value:
    """Multiply the minima of 4 groups by the sums of their inputs."""
    value = all_of(WORDS, 0)
    for number, part in enumerate(halves):
        pair = _read(builder, _at(builder, vector, GROUP_SUMS + 4 * number), ir.IntType(32))
        value = add_pairs(builder, value, part, spread_number(builder, pair, WORDS))
    return value


def _heads(builder: ir.IRBuilder, w: ir.Value, first: int, columns: int) -> list[list[ir.Value]]:
    """Read the minima of a block of int4, and the words with its steps and factors."""
    return [[_read(builder, at, WORDS) for at in _columns(builder, w, _QUAD * i, first, columns)] for i in (0, 1)]


def _steps(builder: ir.IRBuilder, head: ir.Value, group: int) -> ir.Value:
    return builder.and_(builder.lshr(head, all_of(WORDS, 4 * group)), all_of(WORDS, 15))


def _factors(builder: ir.IRBuilder, head: ir.Value) -> ir.Value:
    return builder.bitcast(builder.and_(head, all_of(WORDS, -0x10000)), _FLOATS)


def _codes(
    builder: ir.IRBuilder, w: ir.Value, first: int, columns: int, group: int
) -> Iterator[tuple[int, int, ir.Value]]:
    """Give the codes of a group, the 4 of a quad in the bytes of a word, with the numbers of quad and column."""
    for pair in range(GROUP // 8 * group, GROUP // 8 * (group + 1)):
        for column, at in enumerate(_columns(builder, w, _QUAD * (2 + pair), first, columns)):
            word = _read(builder, at, WORDS)
            for half, part in enumerate((word, builder.lshr(word, all_of(WORDS, 4)))):
                yield 2 * pair + half, column, builder.and_(part, all_of(WORDS, 0x0F0F0F0F))


@intrinsic
def expand(typing_context: Any, w: Any, to: Any, ahead: Any) -> Any:
    """Expand a block of int4 to int8 quads, followed by its factors in float32; prefetch as many bytes."""

    def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        w_, to_, ahead_ = args

        for line in range(0, 2 * _QUAD, _LINE):
            fetch(builder, _at(builder, ahead_, line))
        columns = PANEL // WIDTH
        minima, heads = _heads(builder, w_, 0, columns)
        minima = [builder.bitcast(offset(builder, word), BYTES) for word in minima]
        for group in range(BLOCK // GROUP):
            same = [byte // 4 * 4 + group for byte in range(BYTES.count)]
            low = [shuffle(builder, word, word, same) for word in minima]
            steps = [builder.mul(_steps(builder, word, group), all_of(WORDS, 0x10001)) for word in heads]
            for quad, column, codes in _codes(builder, w_, 0, columns, group):
                # at most 15 * 15: two bytes at once
                scaled = builder.mul(builder.bitcast(codes, HALVES), builder.bitcast(steps[column], HALVES))
                value = builder.add(builder.bitcast(scaled, BYTES), low[column])
                at = _at(builder, to_, _QUAD * quad + 4 * WIDTH * column)
                builder.store(value, builder.inttoptr(at, BYTES.as_pointer()), align=4)
                if quad % 2:
                    fetch(builder, _at(builder, ahead_, _QUAD * (2 + quad // 2) + 4 * WIDTH * column))
        for at, head in zip(_columns(builder, to_, _EXPANDED, 0, columns), heads):
            builder.store(_factors(builder, head), builder.inttoptr(at, _FLOATS.as_pointer()), align=4)

    return types.void(*[types.int64] * 3), lower


def _tiles(generate: Callable[..., None], counts: tuple[int, ...], **options: Any) -> tuple[Callable[..., None], ...]:
    return tuple(_tile(generate, count, **options) for count in counts)


_COUNTS = 6, 4, 2, 1
INT8 = _tile(_lines, 6, n_lines=1, dtype="int8"), *_tiles(_lines, _COUNTS, n_lines=4, dtype="int8")
BFLOAT16 = _tile(_lines, 6, n_lines=1, dtype="bfloat16"), *_tiles(_lines, _COUNTS, n_lines=2, dtype="bfloat16")
"""Six of many vectors, then 6, 4, 2 or one of few."""
int4_two, int4_one = _tiles(_int4, (2, 1))
expanded_six, expanded_four = _tiles(_lines, (6, 4), n_lines=0, dtype="expanded")
