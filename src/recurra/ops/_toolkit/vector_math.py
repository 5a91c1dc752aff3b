"""Elementwise functions of the short float32 vectors of `recurra.ops._toolkit.vectors`: the exponential and its kin.

Numba offers no such functions for these vectors, so each is written as LLVM instructions: a range reduction and a
polynomial. The polynomials are fitted here, by Chebyshev interpolation in float64. Maximum errors, held by the tests:

    exp, sigmoid, tanh  1.2e-7, 1.8e-7 and 1.8e-7, relative; 0 and infinity where exp leaves float32
    softplus            2.2e-7, relative
    expm1               4e-7, relative
    sin, cos            9e-8 for |x| up to 2^30; some number from -1 to 1 where the reduction runs out of bits
    gelu (both), silu   1.6e-7 of max(|x|, 1)
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numpy.polynomial import Chebyshev, Polynomial

from recurra.ops._toolkit.vectors import Lanes, Vector, call_llvm, folded_by_halves


def _fitted(function: Callable[[float], float], low: float, high: float, degree: int) -> list[float]:
    """Fit a polynomial to `function` between `low` and `high`; give its coefficients, the constant first."""
    series = Chebyshev.interpolate(np.vectorize(function), degree, domain=[low, high])
    return [float(c) for c in series.convert(kind=Polynomial).coef]


_HALF_LN2, _QUARTER_TURN = math.log(2) / 2 * 1.01, math.pi / 4 * 1.01  # a little more than rounding can leave
_LN2_HIGH = 0.693359375  # 9 bits: its product with a whole number is exact
_LN2_LOW = math.log(2) - _LN2_HIGH
_HALF_PI_LOW = 6.123233995736766e-17  # pi / 2 less the float64 next to it
_EXP = _fitted(lambda r: (math.exp(r) - 1 - r) / r**2, -_HALF_LN2, _HALF_LN2, 5)
_SIN = _fitted(lambda z: (math.sin(z**0.5) / z**0.5 - 1) / z, 1e-9, _QUARTER_TURN**2, 3)
_COS = _fitted(lambda z: (math.cos(z**0.5) - 1 + z / 2) / z**2, 1e-3, _QUARTER_TURN**2, 3)
_TANH_LARGE = 0.6
_TANH = _fitted(lambda z: (math.tanh(z**0.5) / z**0.5 - 1) / z, 1e-9, _TANH_LARGE**2, 5)
_ATANH = _fitted(lambda z: (math.atanh(z**0.5) / z**0.5 - 1) / z, 1e-9, 1 / 9, 4)
_ERF_IS_ONE = 4.0  # in float32
_ERFC = _fitted(lambda x: -math.log(math.erfc(x)) / x, 1e-9, _ERF_IS_ONE, 11)


class _Math:
    """Writes functions of float32 vectors of one width where `builder` is positioned."""

    def __init__(self, builder: ir.IRBuilder, kind: ir.VectorType) -> None:
        self.builder, self.kind = builder, kind
        self.whole = ir.VectorType(ir.IntType(32), kind.count)
        self.wide = ir.VectorType(ir.DoubleType(), kind.count)

    def constant(self, value: float, kind: ir.VectorType | None = None) -> ir.Value:
        kind = kind or self.kind
        exact = int(value) if kind is self.whole else value
        if kind is self.kind:
            exact = float(np.float32(value))
        return ir.Constant(kind, [exact] * kind.count)

    def call(self, name: str, *arguments: ir.Value) -> ir.Value:
        kind = arguments[0].type
        letter = "f64" if kind.element == ir.DoubleType() else "f32"
        return call_llvm(self.builder, f"{name}.v{kind.count}{letter}", kind, *arguments)

    def multiply_add(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return self.call("fmuladd", x, y, z)  # fused where the machine can

    def polynomial(self, coefficients: list[float], x: ir.Value) -> ir.Value:
        value = self.constant(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            value = self.multiply_add(value, x, self.constant(coefficient))
        return value

    def choose(self, comparison: str, x: ir.Value, y: ir.Value, yes: ir.Value, no: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.fcmp_ordered(comparison, x, y), yes, no)

    def negative(self, x: ir.Value) -> ir.Value:
        return self.builder.fneg(x)

    def absolute(self, x: ir.Value) -> ir.Value:
        return self.call("fabs", x)

    def maximum(self, x: ir.Value, y: ir.Value, comparison: str = ">") -> ir.Value:
        """The larger one; NaN if either is."""
        is_nan = self.builder.fcmp_unordered("uno", x, x)
        return self.builder.select(is_nan, x, self.choose(comparison, x, y, x, y))

    def minimum(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.maximum(x, y, "<")

    def _power_of_two(self, n: ir.Value) -> ir.Value:
        exponent = self.builder.add(n, self.constant(127, self.whole))
        return self.builder.bitcast(self.builder.shl(exponent, self.constant(23, self.whole)), self.kind)

    def exp(self, x: ir.Value) -> ir.Value:
        builder = self.builder
        high, low = self.constant(89.0), self.constant(-104.0)
        held = self.choose("<", x, high, x, high)  # one instruction each; what becomes of NaN is replaced in the end
        held = self.choose(">", held, low, held, low)
        n = self.call("rint", builder.fmul(held, self.constant(1 / math.log(2))))
        r = self.multiply_add(n, self.constant(-_LN2_HIGH), held)
        r = self.multiply_add(n, self.constant(-_LN2_LOW), r)
        value = self.multiply_add(self.polynomial(_EXP, r), builder.fmul(r, r), r)
        value = builder.fadd(value, self.constant(1.0))
        # Two factors, for 2^n alone leaves the range of float32 before the product does.
        n = builder.fptosi(n, self.whole)
        half = builder.ashr(n, self.constant(1, self.whole))
        value = builder.fmul(value, self._power_of_two(half))
        value = builder.fmul(value, self._power_of_two(builder.sub(n, half)))
        return builder.select(builder.fcmp_unordered("uno", x, x), x, value)

    def _sine_after(self, quarters: int, x: ir.Value) -> ir.Value:
        """sin(x + quarters pi / 2)."""
        builder, whole = self.builder, self.whole
        wide = builder.fpext(x, self.wide)
        n = self.call("rint", builder.fmul(wide, self.constant(2 / math.pi, self.wide)))
        rest = self.multiply_add(n, self.constant(-math.pi / 2, self.wide), wide)
        rest = self.multiply_add(n, self.constant(-_HALF_PI_LOW, self.wide), rest)
        edge = self.constant(_QUARTER_TURN)
        r = self.maximum(self.minimum(builder.fptrunc(rest, self.kind), edge), self.negative(edge))
        turns = self.call("floor", builder.fmul(n, self.constant(0.25, self.wide)))
        quarter = self.multiply_add(turns, self.constant(-4.0, self.wide), n)
        quarter = builder.add(builder.fptosi(quarter, whole), self.constant(quarters, whole))
        z = builder.fmul(r, r)
        sine = self.multiply_add(builder.fmul(self.polynomial(_SIN, z), z), r, r)
        cosine = self.multiply_add(self.polynomial(_COS, z), z, self.constant(-0.5))
        cosine = self.multiply_add(cosine, z, self.constant(1.0))
        one, zero = self.constant(1, whole), self.constant(0, whole)
        value = builder.select(builder.icmp_signed("!=", builder.and_(quarter, one), zero), cosine, sine)
        sign = builder.shl(builder.and_(builder.lshr(quarter, one), one), self.constant(31, whole))
        value = builder.bitcast(builder.xor(builder.bitcast(value, whole), sign), self.kind)
        return builder.fadd(value, builder.fmul(x, self.constant(0.0)))  # NaN for infinity

    def sin(self, x: ir.Value) -> ir.Value:
        return self._sine_after(0, x)

    def cos(self, x: ir.Value) -> ir.Value:
        return self._sine_after(1, x)

    def sigmoid(self, x: ir.Value) -> ir.Value:
        return self.builder.fdiv(self.constant(1.0), self.builder.fadd(self.constant(1.0), self.exp(self.negative(x))))

    def silu(self, x: ir.Value) -> ir.Value:
        return self.builder.fdiv(x, self.builder.fadd(self.constant(1.0), self.exp(self.negative(x))))

    def tanh(self, x: ir.Value) -> ir.Value:
        builder, one = self.builder, self.constant(1.0)
        size = self.absolute(x)
        held = self.minimum(size, self.constant(10.0))  # where it is 1
        power = self.exp(builder.fadd(held, held))
        large = builder.fsub(one, builder.fdiv(self.constant(2.0), builder.fadd(power, one)))
        z = builder.fmul(size, size)
        small = self.multiply_add(builder.fmul(self.polynomial(_TANH, z), z), size, size)
        return self.call("copysign", self.choose("<", size, self.constant(_TANH_LARGE), small, large), x)

    def expm1(self, x: ir.Value) -> ir.Value:
        builder, one = self.builder, self.constant(1.0)
        t = self.tanh(builder.fmul(x, self.constant(0.5)))
        small = builder.fdiv(builder.fadd(t, t), builder.fsub(one, t))
        return self.choose("<", self.absolute(x), one, small, builder.fsub(self.exp(x), one))

    def erf(self, x: ir.Value) -> ir.Value:
        size = self.minimum(self.absolute(x), self.constant(_ERF_IS_ONE))
        complement = self.exp(self.negative(self.builder.fmul(size, self.polynomial(_ERFC, size))))
        return self.call("copysign", self.builder.fsub(self.constant(1.0), complement), x)

    def gelu(self, x: ir.Value) -> ir.Value:
        half = self.builder.fmul(x, self.constant(0.5))
        return self.multiply_add(half, self.erf(self.builder.fmul(x, self.constant(0.5**0.5))), half)

    def gelu_tanh(self, x: ir.Value) -> ir.Value:
        builder, scale = self.builder, (2 / math.pi) ** 0.5
        inner = self.multiply_add(builder.fmul(x, x), self.constant(0.044715 * scale), self.constant(scale))
        half = builder.fmul(x, self.constant(0.5))
        return self.multiply_add(half, self.tanh(builder.fmul(inner, x)), half)

    def softplus(self, x: ir.Value) -> ir.Value:
        """max(x, 0) + log(1 + u) with u = exp(-|x|), and log(1 + u) = 2 atanh(s) with s = u / (2 + u)."""
        builder = self.builder
        u = self.exp(self.negative(self.absolute(x)))
        s = builder.fdiv(u, builder.fadd(self.constant(2.0), u))
        z, twice = builder.fmul(s, s), builder.fadd(s, s)
        logarithm = self.multiply_add(builder.fmul(self.polynomial(_ATANH, z), z), twice, twice)
        return builder.fadd(self.maximum(x, self.constant(0.0)), logarithm)

    def sqrt(self, x: ir.Value) -> ir.Value:
        return self.call("sqrt", x)


def write(name: str, builder: ir.IRBuilder, x: ir.Value, *others: ir.Value) -> ir.Value:
    """Write the function called `name` of float32 vectors, x and those it takes beside, where `builder` is positioned.

    Functions of one number ignore a second one.
    """
    m = _Math(builder, x.type)
    if name == "copy":
        return x
    if name in ("add", "sub", "mul", "div"):
        return getattr(builder, f"f{name}")(x, *others)
    if name in ("maximum", "minimum", "multiply_add"):
        return getattr(m, name)(x, *others)
    if name in ("where_positive", "where_not_positive"):
        zero = m.constant(0.0)
        chosen = (x, zero) if name == "where_positive" else (zero, x)
        return builder.select(builder.fcmp_ordered(">", others[0], zero), *chosen)
    return getattr(m, {"neg": "negative", "abs": "absolute"}.get(name, name))(x)


def _elementwise(name: str) -> Any:
    """Make a function of one or two float32 vectors for kernels, place by place."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return write(name, builder, *args)

    def of_one(typing_context: Any, x: Any) -> Any:
        return x(x), generate

    def of_two(typing_context: Any, x: Any, y: Any) -> Any:
        return x(x, y), generate

    function = of_two if name in ("maximum", "div") else of_one
    function.__name__ = name
    return intrinsic(function)


exp, softplus, sigmoid, tanh, sqrt = map(_elementwise, ("exp", "softplus", "sigmoid", "tanh", "sqrt"))
maximum, divide = map(_elementwise, ("maximum", "div"))


@intrinsic
def largest(typing_context: Any, x: Any) -> Any:
    """Give the largest number of a float32 vector as a vector of one; NaN if there is one."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return folded_by_halves(builder, args[0], 1, lambda one, other: write("maximum", builder, one, other))

    return Vector(Lanes("float32", 1))(x), generate
