"""Words for matrix products in Numba kernels: one float32, or two numbers rounded to bfloat16, in 32 bits.

Two bfloat16 numbers times two others are added to a float32 sum by one instruction, with twice the rate of
`multiply_add`. Words travel in vectors of float32, which loads, stores and `spread` copy bit by bit. The argument
`words` is `Lanes`, of which only the number counts: "float32" or "bfloat16".
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recurra.ops._toolkit.vectors import WIDTH, Lanes, Vector, call_llvm, shuffle, spread_number


class _BFloat(ir.Type):
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_bfloat = _BFloat()


@intrinsic
def numbers_in_word(typing_context: Any, words: Any) -> Any:
    """Return 1 for float32 and 2 for bfloat16, as a constant."""
    count = 2 if words.lanes.number == "bfloat16" else 1
    return types.int64(words), lambda context, builder, sig, args: ir.Constant(ir.IntType(64), count)


@intrinsic
def dot_words(typing_context: Any, x: Any, y: Any, z: Any, words: Any) -> Any:
    """Give x y + z for words x and y and numbers z."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        if words.lanes.number == "float32":
            return call_llvm(builder, f"fmuladd.v{z.width}f32", z.ir, *args[:3])
        numbers, parts = ir.VectorType(_bfloat, 2 * WIDTH), []
        for i in range(0, z.width, WIDTH):
            x_i, y_i, z_i = (shuffle(builder, value, value, list(range(i, i + WIDTH))) for value in args[:3])
            factors = [builder.bitcast(value, numbers) for value in (x_i, y_i)]
            parts.append(call_llvm(builder, "x86.avx512bf16.dpbf16ps.512", z_i.type, z_i, *factors))
        while len(parts) > 1:
            size = 2 * parts[0].type.count
            pairs = zip(parts[::2], parts[1::2])
            parts = [shuffle(builder, low, high, list(range(size))) for low, high in pairs]
        return parts[0]

    return z(x, y, z, words), generate


def _rounded(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return builder.fptrunc(x, ir.VectorType(_bfloat, x.type.count))


@intrinsic
def word_of_neighbours(typing_context: Any, x: Any) -> Any:
    """Round a vector to words of neighbouring numbers: half as many words."""
    kind = Vector(Lanes("float32", x.width // 2))
    return kind(x), lambda context, builder, sig, args: builder.bitcast(_rounded(builder, args[0]), kind.ir)


@intrinsic
def word_of_rows(typing_context: Any, x: Any, y: Any) -> Any:
    """Round two vectors to words with a number of each."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        order = [lane // 2 + lane % 2 * x.width for lane in range(2 * x.width)]
        low, high = (_rounded(builder, value) for value in args)
        return builder.bitcast(shuffle(builder, low, high, order), x.ir)

    return x(x, y), generate


@intrinsic
def lanes_from(typing_context: Any, first: Any, lanes: Any) -> Any:
    """Return a vector of 1 in the lanes from number `first` on, and 0 in those before."""
    kind = Vector(lanes.lanes)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        i32s = ir.VectorType(ir.IntType(32), kind.width)
        bound = spread_number(builder, builder.trunc(args[0], ir.IntType(32)), i32s)
        numbers = ir.Constant(i32s, list(range(kind.width)))
        return builder.uitofp(builder.icmp_signed(">=", numbers, bound), kind.ir)

    return kind(types.int64, lanes), generate


@intrinsic
def is_below(typing_context: Any, x: Any, bound: Any) -> Any:
    """Return whether the magnitude of a vector's first number is below a bound."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        number = builder.extract_element(args[0], ir.IntType(32)(0))
        magnitude = call_llvm(builder, "fabs.f32", number.type, number)
        return builder.fcmp_ordered("<", magnitude, builder.fptrunc(args[1], number.type))

    return types.boolean(x, types.float64), generate
