"""The inner loop of a product of float32 weights in rows: two rows times a few vectors, their sums in registers.

A row times a vector has four sums of 16 numbers (see `matvec_kernels`). With the 32 registers of AVX-512 a tile has all
of them in flight, for two rows and three vectors; with the 16 of AVX2 it comes to the same sums one after the other.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from recurra.decoding.tiles import has_wide_registers
from recurra.kernels.vector import WIDTH, Lanes, Vector, fetch

ROWS, AT_ONCE = 2, 4 if has_wide_registers() else 1
"""Rows of a tile, and how many of the four sums it has in flight."""


def _tile(n_vectors: int, is_rest: bool = False) -> Callable[..., None]:
    """Make the intrinsic for this many vectors, and for whole 64 numbers of a row or for the rest of it."""

    @intrinsic
    def multiply(typing_context: Any, w: Any, w_step: Any, x: Any, x_step: Any, sums: Any, count: Any) -> Any:
        """Add to `sums` (sums in flight, rows, vectors, 16): `count` times 64 numbers of each row and vector.

        Of the rest, which goes to the first sums, it is `count` times 16 numbers. `w_step` and `x_step` are bytes from
        one row or vector to the next. The rows after the tile's are fetched meanwhile.
        """

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
            _generate(builder, n_vectors, *((1, 1) if is_rest else (AT_ONCE, 4)), args)

        return types.void(*[types.int64] * 6), generate

    return multiply


def _generate(builder: ir.IRBuilder, n_vectors: int, in_flight: int, stride: int, args: tuple) -> None:
    w, w_step, x, x_step, sums, count = args
    kind, n_bytes = Vector(Lanes("float32", WIDTH)).ir, 4 * WIDTH
    w_at, x_at = _places(builder, w, w_step, 2 * ROWS), _places(builder, x, x_step, n_vectors)
    sums_at = _places(builder, sums, ir.Constant(sums.type, n_bytes), in_flight * ROWS * n_vectors)
    held = [cgutils.alloca_once_value(builder, _load(builder, at)) for at in sums_at]  # registers, to LLVM
    function = ir.FunctionType(kind, [kind] * 3)
    fused = cgutils.get_or_insert_function(builder.module, function, f"llvm.fmuladd.v{WIDTH}f32")
    with cgutils.for_range(builder, count) as loop:
        for number in range(in_flight):
            offset = builder.mul(loop.index, ir.Constant(loop.index.type, n_bytes * stride))
            offset = builder.add(offset, ir.Constant(loop.index.type, n_bytes * number))
            numbers = [_load(builder, builder.add(at, offset)) for at in x_at]
            for row in range(ROWS):
                weights = _load(builder, builder.add(w_at[row], offset))
                fetch(builder, builder.add(w_at[row + ROWS], offset))
                for vector, factor in enumerate(numbers):
                    place = held[(number * ROWS + row) * n_vectors + vector]
                    builder.store(builder.call(fused, [weights, factor, builder.load(place)]), place)
    for at, place in zip(sums_at, held):
        builder.store(builder.load(place), builder.inttoptr(at, kind.as_pointer()), align=4)


def _places(builder: ir.IRBuilder, start: ir.Value, step: ir.Value, count: int) -> list[ir.Value]:
    return [builder.add(start, builder.mul(step, ir.Constant(step.type, i))) for i in range(count)]


def _load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    kind = Vector(Lanes("float32", WIDTH)).ir
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


by_three, by_two, rest_by_three, rest_by_two = _tile(3), _tile(2), _tile(3, True), _tile(2, True)
