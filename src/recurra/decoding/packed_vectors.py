"""Vectors of weights in forms that only decoding keeps: int4 codes and float16 numbers."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recurra.decoding.vector_math import multiplied
from recurra.kernels.vector import Vector


def _loaded(builder: ir.IRBuilder, address: ir.Value, bits: int, width: int) -> ir.Value:
    """Load integers of some bits, as int32."""
    kind = ir.VectorType(ir.IntType(bits), width)
    value = builder.load(builder.inttoptr(address, kind.as_pointer()), align=bits // 8)
    return value if bits == 32 else builder.zext(value, ir.VectorType(ir.IntType(32), width))


def _all(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _weights(builder: ir.IRBuilder, words: ir.Value, at: int | ir.Value, steps: ir.Value, low: ir.Value) -> ir.Value:
    """Give low + steps * (1 + code / 16) for code number `at` of each word.

    With these bits on top of its fraction a float32 is 1 + code / 16: that takes an instruction less than a conversion.
    """
    whole, top = words.type, 19  # where the 4 highest bits of a fraction begin
    if isinstance(at, ir.Value):
        shift = _spread(builder, builder.trunc(builder.mul(at, ir.Constant(at.type, 4)), ir.IntType(32)), whole)
        shifted = builder.shl(builder.lshr(words, shift), _all(whole, top))
    elif 4 * at <= top:
        shifted = builder.shl(words, _all(whole, top - 4 * at))
    else:
        shifted = builder.lshr(words, _all(whole, 4 * at - top))
    bits = builder.or_(builder.and_(shifted, _all(whole, 15 << top)), _all(whole, 127 << 23))
    return multiplied(builder, builder.bitcast(bits, steps.type), steps, low)


def _spread(builder: ir.IRBuilder, number: ir.Value, kind: ir.VectorType) -> ir.Value:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, _all(ir.VectorType(ir.IntType(32), kind.count), 0))


@intrinsic
def multiply_codes(typing_context: Any, words: Any, steps: Any, low: Any, x: Any, sums: Any) -> Any:
    """Add to vector `sums` the weights of 8 inputs, their codes at address `words`, times the 8 numbers at `x`."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        at, steps_, low_, x_at, value = args
        codes = _loaded(builder, at, 32, steps.width)
        for number in range(8):
            factor = builder.load(builder.inttoptr(x_at, ir.FloatType().as_pointer()), align=4)
            weights = _weights(builder, codes, number, steps_, low_)
            value = multiplied(builder, weights, _spread(builder, factor, steps.ir), value)
            x_at = builder.add(x_at, ir.Constant(x_at.type, 4))
        return value

    return sums(types.int64, steps, low, types.int64, sums), generate


@intrinsic
def widen_codes(typing_context: Any, words: Any, steps: Any, low: Any, out: Any) -> Any:
    """Write the weights of 8 inputs, their codes at address `words`, one input after the other to address `out`."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        at, steps_, low_, place = args
        codes = _loaded(builder, at, 32, steps.width)
        for number in range(8):
            pointer = builder.inttoptr(place, steps.ir.as_pointer())
            builder.store(_weights(builder, codes, number, steps_, low_), pointer, align=4)
            place = builder.add(place, ir.Constant(place.type, 4 * steps.width))

    return types.void(types.int64, steps, low, types.int64), generate


@intrinsic
def weights_of_code(typing_context: Any, words: Any, number: Any, steps: Any, low: Any) -> Any:
    """Give the weights of one of 8 inputs, whose codes are at address `words`."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        codes = _loaded(builder, args[0], 32, steps.width)
        return _weights(builder, codes, args[1], *args[2:])

    return steps(types.int64, types.int64, steps, low), generate


@intrinsic
def load_halves(typing_context: Any, address: Any, lanes: Any) -> Any:
    """Load finite float16 numbers as float32 `lanes`, without instructions that a machine may not have."""
    kind = Vector(lanes.lanes)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        bits = _loaded(builder, args[0], 16, kind.width)
        whole = bits.type
        size = builder.shl(builder.and_(bits, _all(whole, 0x7FFF)), _all(whole, 13))
        # float32's exponents begin 112 lower; the product is exact, also for numbers below float16's normal ones
        size = builder.fmul(builder.bitcast(size, kind.ir), _constant(kind.ir, 2.0**112))
        sign = builder.shl(builder.and_(bits, _all(whole, 0x8000)), _all(whole, 16))
        return builder.bitcast(builder.or_(builder.bitcast(size, whole), sign), kind.ir)

    return kind(types.int64, lanes), generate


def _constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)
