"""float16 numbers as float32 vectors, on machines with and without instructions for it."""

from llvmlite import ir

from recurra.decoding.byte_products import all_of, has


def halves(builder: ir.IRBuilder, address: ir.Value, width: int) -> ir.Value:
    """Load finite float16 numbers from an address as float32."""
    whole, floats = ir.VectorType(ir.IntType(32), width), ir.VectorType(ir.FloatType(), width)
    if has("f16c", "fullfp16"):
        numbers = ir.VectorType(ir.HalfType(), width)
        return builder.fpext(builder.load(builder.inttoptr(address, numbers.as_pointer()), align=2), floats)
    stored = builder.inttoptr(address, ir.VectorType(ir.IntType(16), width).as_pointer())
    bits = builder.zext(builder.load(stored, align=2), whole)
    size = builder.shl(builder.and_(bits, all_of(whole, 0x7FFF)), all_of(whole, 13))
    # float32's exponents begin 112 lower; the product is exact, also for numbers below float16's normal ones
    size = builder.fmul(builder.bitcast(size, floats), all_of(floats, 2.0**112))
    sign = builder.shl(builder.and_(bits, all_of(whole, 0x8000)), all_of(whole, 16))
    return builder.bitcast(builder.or_(builder.bitcast(size, whole), sign), floats)
