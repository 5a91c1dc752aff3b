"""Vectors as whole numbers with one scale in the kernels of a step, as `recurra.layers.quantization` makes them."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recurra.decoding._tiles import number, real
from recurra.ops._toolkit.launch import compile_part
from recurra.ops._toolkit.vector_math import divide, largest, maximum
from recurra.ops._toolkit.vectors import WIDTH, Lanes, Vector, call_llvm, load, load_part, spread, store, zeros

_FLOATS, _ONE = Lanes("float32", WIDTH), Lanes("float32", 1)
_SMALLEST = 1e-30


def _loads(bits: int) -> Callable[..., Any]:
    @intrinsic
    def load_codes(typing_context: Any, address: Any, index: Any, lanes: Any) -> Any:
        """Load whole numbers, from number `index` after `address` on, as floats."""
        kind = Vector(lanes.lanes)

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
            at = builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, bits // 8)))
            place = builder.inttoptr(at, ir.VectorType(ir.IntType(bits), kind.width).as_pointer())
            whole = builder.sext(builder.load(place, align=1), ir.VectorType(ir.IntType(32), kind.width))
            return builder.sitofp(whole, kind.ir)

        return kind(types.int64, types.int64, lanes), generate

    return load_codes


def _stores(bits: int) -> Callable[..., None]:
    @intrinsic
    def store_codes(typing_context: Any, address: Any, index: Any, vector: Any) -> Any:
        """Round floats, to even if halfway, and write them from number `index` after `address` on."""
        codes, words = (ir.VectorType(ir.IntType(size), vector.width) for size in (bits, 32))

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
            near = call_llvm(builder, f"rint.v{vector.width}f32", args[2].type, args[2])
            at = builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, bits // 8)))
            place = builder.inttoptr(at, codes.as_pointer())
            builder.store(builder.trunc(builder.fptosi(near, words), codes), place, align=1)

        return types.void(types.int64, types.int64, vector), generate

    return store_codes


load_bytes, _load_words = _loads(8), _loads(16)
_store_bytes, _store_words = _stores(8), _stores(16)


@compile_part
def encode(at, x, n, wide, is_int8):  # type: ignore[no-untyped-def]
    """Write n floats as `wide` codes of int8 or int16 and their scale."""
    peaks = zeros(_FLOATS)
    for i in range(0, n, WIDTH):
        part = load(x, i, _FLOATS) if i + WIDTH <= n else load_part(x, i, n - i, _FLOATS)
        peaks = maximum(peaks, maximum(part, zeros(_FLOATS) - part))
    peak, most = largest(peaks), number(127 if is_int8 else 32767, _ONE)
    scale = at + wide * (1 if is_int8 else 2)
    store(scale, 0, _ONE, peak)
    factor = spread(divide(most, peak) if real(scale, 0) > _SMALLEST else zeros(_ONE), _FLOATS)
    store(scale, 0, _ONE, divide(peak, most))
    for i in range(0, n, WIDTH):
        code = (load(x, i, _FLOATS) if i + WIDTH <= n else load_part(x, i, n - i, _FLOATS)) * factor
        if is_int8:
            _store_bytes(at, i, code)
        else:
            _store_words(at, i, code)


@compile_part
def decode(x, at, wide):  # type: ignore[no-untyped-def]
    """Write the floats that `wide` codes of int16 and their scale stand for."""
    scale = spread(load(at + 2 * wide, 0, _ONE), _FLOATS)
    for i in range(0, wide, WIDTH):
        store(x, i, _FLOATS, _load_words(at, i, _FLOATS) * scale)
