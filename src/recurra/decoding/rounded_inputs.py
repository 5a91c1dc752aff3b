"""Inputs of a product as whole numbers from -127 to 127, with a scale for every 128 of a vector.

A block of 128 inputs becomes a record: the codes (see `byte_products`), the scale, the sums of the codes of each 32,
and the sum of all. Missing inputs of a last block are zeros. A block with a number that is not finite has a scale that
is not finite either, and so have its results.
"""

from typing import Any

from jaxtyping import Float
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional

from recurra.decoding.byte_products import I32, QUAD_BYTES, WORDS, all_of, spread
from recurra.decoding.panels import GROUP
from recurra.kernels.launch import compile_function
from recurra.kernels.vector import WIDTH

BLOCK = 128
"""Inputs with one scale."""
CODES = BLOCK // 4 * QUAD_BYTES
SCALE, GROUP_SUMS, SUM = CODES, CODES + 4, CODES + 4 + 4 * (BLOCK // GROUP)
"""Where the parts of a record begin; all but the codes are float32."""
RECORD = CODES + 64
_LARGEST = 127
_SMALLEST = 1e-30  # blocks without a larger number are zeros: 127 / x could be infinite
_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, WIDTH)


def rounded(x: Float[Tensor, "... n_in"]) -> Float[Tensor, "... n_in"]:
    """Give the numbers that inputs are rounded to: the plain reference of `round_inputs`."""
    n_in = x.shape[-1]
    blocks = functional.pad(x, (0, -n_in % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    is_zero = largest < _SMALLEST
    codes = (blocks * (_LARGEST / largest.masked_fill(is_zero, 1.0))).round()
    return (codes * (largest / _LARGEST)).masked_fill(is_zero, 0.0).flatten(-2)[..., :n_in]


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _take_block(builder: ir.IRBuilder, x: ir.Value, count: ir.Value) -> list[ir.Value]:
    """Load up to 128 numbers, as vectors of 16; those from `count` on are 0, and their memory is not touched."""
    parts, left = [], spread(builder, builder.trunc(count, I32), WORDS)
    for first in range(0, BLOCK, WIDTH):
        mask = builder.icmp_signed("<", ir.Constant(WORDS, list(range(first, first + WIDTH))), left)
        at = builder.inttoptr(builder.add(x, ir.Constant(x.type, 4 * first)), _FLOATS.as_pointer())
        loaded = _call(builder, "llvm.masked.load.v16f32.p0", _FLOATS, at, I32(4), mask, all_of(_FLOATS, 0.0))
        parts.append(loaded)
    return parts


def _largest_of(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """The largest size of a block's numbers, NaN if one is NaN."""
    sizes = [_call(builder, "llvm.fabs.v16f32", _FLOATS, part) for part in parts]
    while len(sizes) > 1:
        sizes = [_call(builder, "llvm.maximum.v16f32", _FLOATS, *pair) for pair in zip(sizes[::2], sizes[1::2])]
    value, width = sizes[0], WIDTH
    while width > 1:
        width //= 2
        lanes = ir.Constant(WORDS, [(lane + width) % WIDTH for lane in range(WIDTH)])
        value = _call(builder, "llvm.maximum.v16f32", _FLOATS, value, builder.shuffle_vector(value, value, lanes))
    return builder.extract_element(value, I32(0))


def _put(builder: ir.IRBuilder, record: ir.Value, offset: int, value: ir.Value) -> None:
    at = builder.add(record, ir.Constant(record.type, offset))
    builder.store(value, builder.inttoptr(at, value.type.as_pointer()), align=4)


def _put_codes(builder: ir.IRBuilder, record: ir.Value, first: int, codes: ir.Value) -> None:
    """Write 16 codes, the first of which is number `first` of the block."""
    order = list(range(WIDTH))
    if QUAD_BYTES == 8:
        order = [quad + place for quad in range(0, WIDTH, 4) for place in (0, 2, 1, 3)]
    narrow = ir.VectorType(ir.IntType(2 * QUAD_BYTES), WIDTH)
    ordered = builder.shuffle_vector(codes, codes, ir.Constant(WORDS, order))
    _put(builder, record, first // 4 * QUAD_BYTES, builder.trunc(ordered, narrow))


@intrinsic
def _round_block(typing_context: Any, x: Any, count: Any, record: Any) -> Any:
    """Write the record of `count` numbers from address `x` on."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        parts = _take_block(builder, args[0], args[1])
        largest, limit = _largest_of(builder, parts), _FLOAT(_LARGEST)
        is_zero = builder.fcmp_ordered("<", largest, _FLOAT(_SMALLEST))
        factor = builder.select(is_zero, _FLOAT(0.0), builder.fdiv(limit, largest))
        _put(builder, args[2], SCALE, builder.select(is_zero, _FLOAT(0.0), builder.fdiv(largest, limit)))
        factors, sums = spread(builder, factor, _FLOATS), []
        for number, part in enumerate(parts):
            whole = _call(builder, "llvm.rint.v16f32", _FLOATS, builder.fmul(part, factors))
            codes = _call(builder, "llvm.fptosi.sat.v16i32.v16f32", WORDS, whole)  # defined for NaN, too
            _put_codes(builder, args[2], WIDTH * number, codes)
            sums.append(_call(builder, "llvm.vector.reduce.add.v16i32", I32, codes))
        per_group = GROUP // WIDTH
        groups = [builder.add(*sums[i : i + per_group]) for i in range(0, len(sums), per_group)]
        for number, group in enumerate(groups):
            _put(builder, args[2], GROUP_SUMS + 4 * number, builder.sitofp(group, _FLOAT))
        all_sums = groups[0]
        for group in groups[1:]:
            all_sums = builder.add(all_sums, group)
        _put(builder, args[2], SUM, builder.sitofp(all_sums, _FLOAT))

    return types.void(types.int64, types.int64, types.int64), generate


@compile_function
def round_inputs(x, n_in, vectors, records):  # type: ignore[no-untyped-def]
    """Write the records (vectors, blocks) of x (vectors, n_in), addresses."""
    for vector in range(vectors):
        for start in range(0, n_in, BLOCK):
            _round_block(x + 4 * (vector * n_in + start), min(BLOCK, n_in - start), records)
            records += RECORD
