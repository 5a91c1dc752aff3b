"""What a compiled step does with the short float32 vectors of `recurra.kernels.vector`.

`apply(code, x, y)` runs the function of `recurra.kernels.vector_math` that a number chooses: one loop
serves all.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recurra.decoding.instructions import FUNCTIONS
from recurra.kernels.vector import Lanes, Vector
from recurra.kernels.vector_math import write


@intrinsic
def apply(typing_context: Any, code: Any, x: Any, y: Any) -> Any:
    """Give function number `code` (see `instructions.FUNCTIONS`) of float32 vectors x and, if it takes two, y."""
    if not (isinstance(x, Vector) and x == y and not x.is_double and not x.is_complex):
        return None

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        end, unknown = builder.append_basic_block("applied"), builder.append_basic_block("unknown")
        switch = builder.switch(args[0], unknown)
        results = []
        for number, name in enumerate(FUNCTIONS):
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


def multiplied(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
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
