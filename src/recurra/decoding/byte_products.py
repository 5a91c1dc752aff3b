"""Sums of products of bytes as LLVM: 16 outputs at once, each with 4 weights and the 4 inputs that belong to them.

What a machine has for it decides how the inputs lie in memory (`QUAD_BYTES` for 4 of them), not the result: sums are
whole numbers, and exact.

    VNNI      one instruction; the 4 inputs side by side
    other     two, which add products of pairs of 16 bits; inputs 0 and 2, then 1 and 3, as 16 bits each
"""

from collections.abc import Sequence

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils

from recurra.kernels.vector import WIDTH

I32 = ir.IntType(32)
WORDS = ir.VectorType(I32, WIDTH)
"""The type of the sums, and of 4 weights of every output."""
_HALVES = ir.VectorType(ir.IntType(16), 2 * WIDTH)


def has(*features: str) -> bool:
    """Tell whether kernels are compiled for one of these."""
    chosen = numba.config.CPU_FEATURES
    if chosen is None and numba.config.CPU_NAME is None:
        return any(llvmlite.binding.get_host_cpu_features().get(name) for name in features)
    return any(f"+{name}" in (chosen or "").split(",") for name in features)


_PER_PRODUCT = WIDTH if has("avx512vnni") else WIDTH // 2 if has("avxvnni") else 0
"""Outputs of one VNNI instruction; 0 without."""
QUAD_BYTES = 4 if _PER_PRODUCT else 8
"""Room that 4 inputs take."""
SIGNED_OFFSET = 128 if _PER_PRODUCT else 0
"""VNNI multiplies weights without a sign: signed ones are this much too large in its sums."""


def spread(builder: ir.IRBuilder, number: ir.Value, kind: ir.VectorType) -> ir.Value:
    """Copy a number into every place of a vector."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))


def all_of(kind: ir.VectorType, value: float) -> ir.Constant:
    """A vector of one number."""
    return ir.Constant(kind, [value] * kind.count)


def prepared(builder: ir.IRBuilder, weights: ir.Value, is_signed: bool) -> list[ir.Value]:
    """Bring 4 weights of each output, a word, into the form that `products` takes."""
    if _PER_PRODUCT:
        return [builder.xor(weights, all_of(WORDS, -0x7F7F7F80)) if is_signed else weights]  # 0x80808080
    eight, halves = all_of(_HALVES, 8), builder.bitcast(weights, _HALVES)
    shift = builder.ashr if is_signed else builder.lshr
    return [shift(builder.shl(halves, eight), eight), shift(halves, eight)]


def products(builder: ir.IRBuilder, sums: ir.Value, weights: Sequence[ir.Value], inputs: ir.Value) -> ir.Value:
    """Add to each sum its 4 weights times the 4 inputs at an address."""
    for number, part in enumerate(weights):
        at = builder.add(inputs, ir.Constant(inputs.type, 4 * number))
        word = builder.load(builder.inttoptr(at, I32.as_pointer()), align=4)
        same = spread(builder, word, WORDS)
        sums = _by_vnni(builder, sums, part, same) if _PER_PRODUCT else _by_pairs(builder, sums, part, same)
    return sums


def _by_vnni(builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, inputs: ir.Value) -> ir.Value:
    width = _PER_PRODUCT
    kind = ir.VectorType(I32, width)
    name = f"llvm.x86.avx512.vpdpbusd.{32 * width}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    parts = []
    for first in range(0, WIDTH, width):
        lanes = ir.Constant(kind, list(range(first, first + width)))
        parts.append(builder.call(function, [builder.shuffle_vector(v, v, lanes) for v in (sums, weights, inputs)]))
    return parts[0] if len(parts) == 1 else builder.shuffle_vector(*parts, ir.Constant(WORDS, list(range(WIDTH))))


def _by_pairs(builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, inputs: ir.Value) -> ir.Value:
    """Let LLVM find the instruction that multiplies 16 bits and adds neighbours."""
    wide = ir.VectorType(I32, 2 * WIDTH)
    whole = builder.mul(builder.sext(weights, wide), builder.sext(builder.bitcast(inputs, _HALVES), wide))
    even, odd = (builder.shuffle_vector(whole, whole, ir.Constant(WORDS, list(range(i, 2 * WIDTH, 2)))) for i in (0, 1))
    return builder.add(sums, builder.add(even, odd))
