"""Sums of products of bytes as LLVM, and inputs rounded to whole numbers."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional

from recurra.decoding.linear import BLOCK
from recurra.ops._toolkit.launch import compile_part
from recurra.ops._toolkit.vector_math import write
from recurra.ops._toolkit.vectors import (
    WIDTH,
    Lanes,
    all_of,
    call_llvm,
    compiles_for,
    load,
    load_part,
    shuffle,
    spread_number,
    store,
)

# --- sums of products of bytes: 16 outputs at once, each with 4 weights and the 4 inputs that belong to them ---
#
# What a machine has for it decides how the inputs lie in memory (`QUAD_BYTES` for 4 of them), not the result: sums
# are whole numbers, and exact.
#
#     VNNI      one instruction; the 4 inputs side by side
#     other     two, which add products of pairs of 16 bits; inputs 0 and 2, then 1 and 3, as 16 bits each
#     AVX2      for codes of int4, one which adds products of pairs of bytes to 16 bits; the 4 inputs side by side


_I32 = ir.IntType(32)
WORDS = ir.VectorType(_I32, WIDTH)
"""The type of the sums, and of 4 weights of every output."""
HALVES, BYTES = ir.VectorType(ir.IntType(16), 2 * WIDTH), ir.VectorType(ir.IntType(8), 4 * WIDTH)
"""The types that see 2 halves or 4 bytes in a word."""
_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, WIDTH)


_PER_PRODUCT = WIDTH if compiles_for("avx512vnni") else WIDTH // 2 if compiles_for("avxvnni") else 0
"""Outputs of one VNNI instruction; 0 without."""
QUAD_BYTES = 4 if _PER_PRODUCT else 8
"""Room that 4 inputs take."""
_BY_BYTES = not _PER_PRODUCT and compiles_for("avx2") and not compiles_for("avx512bw")
SIGNED_OFFSET = 128 if _PER_PRODUCT else 0
"""VNNI multiplies weights without a sign: signed ones are this much too large in its sums."""


def offset(builder: ir.IRBuilder, weights: ir.Value) -> ir.Value:
    """Add to 4 signed bytes of each output, a word, what the inputs' records make up for."""
    return builder.xor(weights, all_of(WORDS, -0x7F7F7F80)) if _PER_PRODUCT else weights  # 0x80808080


def prepared(builder: ir.IRBuilder, weights: ir.Value) -> list[ir.Value]:
    """Bring 4 weights of each output, a word with `offset`, into the form that `products` takes."""
    return [weights] if _PER_PRODUCT else halves_of(builder, weights)


def halves_of(builder: ir.IRBuilder, weights: ir.Value) -> list[ir.Value]:
    """Widen bytes 0 and 2 of each word to 16 bits, and bytes 1 and 3."""
    eight, halves = all_of(HALVES, 8), builder.bitcast(weights, HALVES)
    return [builder.ashr(builder.shl(halves, eight), eight), builder.ashr(halves, eight)]


def products(builder: ir.IRBuilder, sums: ir.Value, weights: Sequence[ir.Value], inputs: ir.Value) -> ir.Value:
    """Add to each sum its 4 weights times the 4 inputs at an address."""
    for number, part in enumerate(weights):
        same = _spread_word(builder, inputs, 4 * number)
        sums = _by_vnni(builder, sums, part, same) if _PER_PRODUCT else add_pairs(builder, sums, part, same)
    return sums


def code_products(
    builder: ir.IRBuilder, sums: ir.Value | None, codes: ir.Value, record: ir.Value, quad: int
) -> ir.Value:
    """Add 4 codes of each output from 0 to 15, a word, times inputs of a record; None: the first products.

    The sums of a group, 32 inputs, are words or, by bytes, pairs of halves: 8 * 2 * 15 * 127 < 2 ** 15.
    """
    if not _BY_BYTES:
        weights = [codes] if _PER_PRODUCT else halves_of(builder, codes)
        inputs = builder.add(record, ir.Constant(record.type, QUAD_BYTES * quad))
        return products(builder, all_of(WORDS, 0) if sums is None else sums, weights, inputs)
    same = builder.bitcast(_spread_word(builder, record, _AS_BYTES + 4 * quad), BYTES)
    found = _by_parts(builder, "x86.avx2.pmadd.ub.sw", HALVES, builder.bitcast(codes, BYTES), same)
    return found if sums is None else builder.add(sums, found)


def add_scaled(builder: ir.IRBuilder, sums: ir.Value, part: ir.Value, steps: ir.Value) -> ir.Value:
    """Add what `code_products` found, times the steps of a group, words from 0 to 15."""
    if not _BY_BYTES:
        return builder.add(sums, builder.mul(part, steps))
    both = builder.bitcast(builder.or_(steps, builder.shl(steps, all_of(WORDS, 16))), HALVES)
    return builder.add(sums, _by_parts(builder, "x86.avx2.pmadd.wd", WORDS, part, both))


def _spread_word(builder: ir.IRBuilder, start: ir.Value, at: int) -> ir.Value:
    place = builder.inttoptr(builder.add(start, ir.Constant(start.type, at)), _I32.as_pointer())
    return spread_number(builder, builder.load(place, align=4), WORDS)


def _by_vnni(builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, inputs: ir.Value) -> ir.Value:
    return _by_parts(builder, f"x86.avx512.vpdpbusd.{32 * _PER_PRODUCT}", WORDS, sums, weights, inputs)


def _by_parts(builder: ir.IRBuilder, name: str, kind: ir.VectorType, *vectors: ir.Value) -> ir.Value:
    """Call an instruction for vectors of 512 bits, or for each half of them."""
    count, results = 1 if _PER_PRODUCT == WIDTH else 2, []
    for number in range(count):
        parts = []
        for vector in vectors:
            size = vector.type.count // count
            parts.append(shuffle(builder, vector, vector, list(range(size * number, size * (number + 1)))))
        results.append(call_llvm(builder, name, ir.VectorType(kind.element, kind.count // count), *parts))
    return shuffle(builder, results[0], results[-1], list(range(kind.count)))


def add_pairs(builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, inputs: ir.Value) -> ir.Value:
    """Add products of 16 bits, two to each sum; LLVM finds the instruction."""
    wide = ir.VectorType(_I32, 2 * WIDTH)
    whole = builder.mul(builder.sext(weights, wide), builder.sext(builder.bitcast(inputs, HALVES), wide))
    even, odd = (shuffle(builder, whole, whole, list(range(i, 2 * WIDTH, 2))) for i in (0, 1))
    return builder.add(sums, builder.add(even, odd))


# --- sums of products of pairs of bfloat16, which lie in one word: 16 outputs at once ---
#
# Without the instruction, both halves become float32, and so are the inputs in memory (`PAIR_BYTES` for 2 of them).


_HAS_PAIRS = compiles_for("avx512bf16")
PAIR_BYTES = 4 if _HAS_PAIRS else 8
"""Room that 2 inputs take."""


def prepared_pair(builder: ir.IRBuilder, weights: ir.Value) -> list[ir.Value]:
    """Bring 2 weights of each output, a word, into the form that `pair_products` takes."""
    if _HAS_PAIRS:
        return [weights]
    parts = builder.shl(weights, all_of(WORDS, 16)), builder.and_(weights, all_of(WORDS, -0x10000))
    return [builder.bitcast(part, _FLOATS) for part in parts]


def pair_products(builder: ir.IRBuilder, sums: ir.Value, weights: Sequence[ir.Value], inputs: ir.Value) -> ir.Value:
    """Add to each sum its 2 weights times the 2 inputs at an address."""
    if _HAS_PAIRS:
        word = builder.load(builder.inttoptr(inputs, _I32.as_pointer()), align=4)
        both = spread_number(builder, word, WORDS)
        return call_llvm(builder, "x86.avx512bf16.dpbf16ps.512", _FLOATS, sums, weights[0], both)
    for number, part in enumerate(weights):
        at = builder.add(inputs, ir.Constant(inputs.type, 4 * number))
        one = builder.load(builder.inttoptr(at, _FLOAT.as_pointer()), align=4)
        sums = write("multiply_add", builder, part, spread_number(builder, one, _FLOATS), sums)
    return sums


# --- inputs of a product, rounded: to bfloat16, or to whole numbers from -127 to 127 with a scale for every 128 ---
#
# A block of 128 inputs becomes a record. For int8 and int4 it has the codes, the scale, the whole number at which sums
# start, and the sums of the 4 groups of codes, as 16 bits in the order 0, 2, 1, 3. By bytes, the codes follow once
# more. Missing inputs of a last block are zeros. A block with a number that is not finite has a scale that is not
# finite either, and so have its results.


_CODES = BLOCK // 4 * QUAD_BYTES
SCALE, START, GROUP_SUMS = _CODES, _CODES + 4, _CODES + 8
"""Where the parts of a record begin."""
_AS_BYTES = _CODES + 64
RECORD, PAIRS_RECORD = _CODES + 64 + BLOCK * _BY_BYTES, BLOCK // 2 * PAIR_BYTES
"""Bytes of a record of whole numbers, and of one of bfloat16."""
_FLOAT32, _BFLOAT16 = Lanes("float32", WIDTH), Lanes("bfloat16", WIDTH)
_LARGEST = 127
_SMALLEST = 1e-30  # blocks without a larger number are zeros: 127 / x could be infinite


def rounded(x: Float[Tensor, "... n_in"]) -> Float[Tensor, "... n_in"]:
    """Give the numbers that inputs of int8 and int4 are rounded to: the plain reference of `round_inputs`."""
    n_in = x.shape[-1]
    blocks = functional.pad(x, (0, -n_in % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    is_zero = largest < _SMALLEST
    codes = (blocks * (_LARGEST / largest.masked_fill(is_zero, 1.0))).round()
    return (codes * (largest / _LARGEST)).masked_fill(is_zero, 0.0).flatten(-2)[..., :n_in]


def _take_block(builder: ir.IRBuilder, x: ir.Value, count: ir.Value) -> list[ir.Value]:
    """Load up to 128 numbers, as vectors of 16; those from `count` on are 0, and their memory is not touched."""
    parts, left = [], spread_number(builder, builder.trunc(count, _I32), WORDS)
    for first in range(0, BLOCK, WIDTH):
        mask = builder.icmp_signed("<", ir.Constant(WORDS, list(range(first, first + WIDTH))), left)
        at = builder.inttoptr(builder.add(x, ir.Constant(x.type, 4 * first)), _FLOATS.as_pointer())
        loaded = call_llvm(builder, "masked.load.v16f32.p0", _FLOATS, at, _I32(4), mask, all_of(_FLOATS, 0.0))
        parts.append(loaded)
    return parts


def _largest_of(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """The largest size of a block's numbers, NaN if one is NaN: without signs, they are in the order of their bits."""
    sizes = [builder.and_(builder.bitcast(part, WORDS), all_of(WORDS, 0x7FFFFFFF)) for part in parts]
    while len(sizes) > 1:
        sizes = [call_llvm(builder, "smax.v16i32", WORDS, *pair) for pair in zip(sizes[::2], sizes[1::2])]
    return builder.bitcast(call_llvm(builder, "vector.reduce.smax.v16i32", _I32, sizes[0]), _FLOAT)


def _put(builder: ir.IRBuilder, record: ir.Value, offset: int, value: ir.Value) -> None:
    at = builder.add(record, ir.Constant(record.type, offset))
    builder.store(value, builder.inttoptr(at, value.type.as_pointer()), align=2)


def _put_codes(builder: ir.IRBuilder, record: ir.Value, first: int, codes: ir.Value) -> None:
    """Write 16 codes, the first of which is number `first` of the block."""
    if _BY_BYTES:
        _put(builder, record, _AS_BYTES + first, builder.trunc(codes, ir.VectorType(ir.IntType(8), WIDTH)))
    order = list(range(WIDTH))
    if QUAD_BYTES == 8:
        order = [quad + place for quad in range(0, WIDTH, 4) for place in (0, 2, 1, 3)]
    narrow = ir.VectorType(ir.IntType(2 * QUAD_BYTES), WIDTH)
    _put(builder, record, first // 4 * QUAD_BYTES, builder.trunc(shuffle(builder, codes, codes, order), narrow))


@intrinsic
def _round_block(typing_context: Any, x: Any, count: Any, record: Any) -> Any:
    """Write the record of `count` numbers from address `x` on."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        parts = _take_block(builder, args[0], args[1])
        largest, limit = _largest_of(builder, parts), _FLOAT(_LARGEST)
        is_zero = builder.fcmp_ordered("<", largest, _FLOAT(_SMALLEST))
        factor = builder.select(is_zero, _FLOAT(0.0), builder.fdiv(limit, largest))
        scale = builder.select(is_zero, _FLOAT(0.0), builder.fdiv(largest, limit))
        is_finite = builder.fcmp_ordered("<", largest, _FLOAT(float("inf")))  # of an infinity, the codes lose the sign
        _put(builder, args[2], SCALE, builder.select(is_finite, scale, _FLOAT(float("nan"))))
        factors, sums = spread_number(builder, factor, _FLOATS), []
        for number, part in enumerate(parts):
            whole = call_llvm(builder, "rint.v16f32", _FLOATS, builder.fmul(part, factors))
            for comparison, bound in (("<", _LARGEST), (">", -_LARGEST)):  # an integer even where it is NaN
                is_within = builder.fcmp_ordered(comparison, whole, all_of(_FLOATS, bound))
                whole = builder.select(is_within, whole, all_of(_FLOATS, bound))
            codes = builder.fptosi(whole, WORDS)
            _put_codes(builder, args[2], WIDTH * number, codes)
            sums.append(codes)
        groups = [builder.add(*pair) for pair in zip(sums[::2], sums[1::2])]
        sums = [call_llvm(builder, "vector.reduce.add.v16i32", _I32, group) for group in groups]
        for place, group in enumerate((0, 2, 1, 3)):
            _put(builder, args[2], GROUP_SUMS + 2 * place, builder.trunc(sums[group], ir.IntType(16)))
        total = builder.add(builder.add(sums[0], sums[1]), builder.add(sums[2], sums[3]))
        _put(builder, args[2], START, builder.mul(total, _I32(-SIGNED_OFFSET)))

    return types.void(types.int64, types.int64, types.int64), generate


@compile_part
def round_inputs(x, n_in, vectors, records):  # type: ignore[no-untyped-def]
    """Write the records (vectors, blocks) of x (vectors, n_in), addresses."""
    for vector in range(vectors):
        for start in range(0, n_in, BLOCK):
            _round_block(x + 4 * (vector * n_in + start), min(BLOCK, n_in - start), records)
            records += RECORD


@compile_part
def round_to_pairs(x, n_in, vectors, records):  # type: ignore[no-untyped-def]
    """Write the records (vectors, blocks) of x (vectors, n_in) for bfloat16."""
    for vector in range(vectors):
        for i in range(0, n_in, WIDTH):
            at = records + PAIR_BYTES // 2 * i
            store(at, 0, _BFLOAT16, load_part(x + 4 * vector * n_in, i, n_in - i, _FLOAT32))
            if PAIR_BYTES == 8:
                store(at, 0, _FLOAT32, load(at, 0, _BFLOAT16))
        records += PAIRS_RECORD * ((n_in + BLOCK - 1) // BLOCK)
