"""Short vectors for Numba kernels: loads, stores, arithmetic and prefetches that compile to SIMD instructions.

LLVM's automatic vectoriser gives up on a recurrence, so the kernels spell it out. `Lanes` names a kind and count of
numbers. `load(address, i, lanes)` reads one vector of neighbours, `+ - *` and `conjugate` work on whole vectors, and
`store` writes one back. No fast-math flag is set and no product is contracted: each lane does the operations of the
plain torch reference, in the same order.

Memory is named by its address (a Python integer, from `Tensor.data_ptr`), so calls are short and inner functions free
of reference counts. Positions and widths count floats: complex numbers are interleaved (real, imaginary), as in torch.
bfloat16 and float16 are widened to float32 when loaded and rounded to nearest even when stored; for float16 not every
processor has the instructions (`converts_float16`).
Nothing checks bounds: every operator checks its tensors before it takes an address.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin, lower_constant
from numba.core.registry import cpu_target
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model, typeof_impl

WIDTH = 16  # floats in a vector: one AVX-512 register, two of AVX2, four of NEON
_PREFETCH_INTO_L2 = 2  # LLVM's locality 2; into L1, a core's few line fill buffers limit the rate
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Lanes:
    """What a vector holds: `width` floats of the type `number`, as in memory, or `width` / 2 complex pairs."""

    number: str
    width: int
    is_complex: bool = False

    @property
    def n_bytes(self) -> int:
        """The size of one float in memory."""
        return _BYTES[self.number]


@cache
def compiles_for(feature: str) -> bool:
    """Return whether Numba compiles for a processor with this feature, by LLVM's name."""
    return f"+{feature}" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


def converts_float16() -> bool:
    """Return whether Numba compiles for a processor that converts float16 (with F16C, if it is an x86)."""
    triple = cpu_target.target_context.codegen().magic_tuple()[0]
    return triple.startswith(("aarch64", "arm64")) or compiles_for("f16c")


class _LanesType(types.Opaque):
    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        super().__init__(repr(lanes))


class Vector(types.Type):
    """The Numba type of a vector in registers: float32 or float64, real or complex pairs."""

    def __init__(self, lanes: Lanes) -> None:
        self.is_double = lanes.number == "float64"
        self.width = lanes.width
        self.is_complex = lanes.is_complex
        super().__init__(f"Vector({self.is_double}, {self.width}, {self.is_complex})")

    @property
    def ir(self) -> ir.VectorType:
        """The LLVM type."""
        return ir.VectorType(ir.DoubleType() if self.is_double else ir.FloatType(), self.width)


register_model(_LanesType)(models.OpaqueModel)


@typeof_impl.register(Lanes)
def _type_of_lanes(lanes: Lanes, context: Any) -> _LanesType:
    return _LanesType(lanes)


@lower_constant(_LanesType)
def _lanes_constant(context: Any, builder: ir.IRBuilder, kind: Any, value: Any) -> ir.Value:
    return context.get_dummy_value()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.ir)


def _register_operator(operation: Callable[..., Any], lower: Callable[..., ir.Value]) -> None:
    @infer_global(operation)
    class _Typing(AbstractTemplate):
        def generic(self, args: tuple, kws: dict) -> Any:
            if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
                return signature(args[0], *args)
            return None

    @lower_builtin(operation, Vector, Vector)
    def _lower(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return lower(builder, sig.return_type, *args)


def shuffle(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, lanes: list[int]) -> ir.Value:
    """Take the numbers of two vectors, one after the other, in this order."""
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def _shuffle(builder: ir.IRBuilder, value: ir.Value, lanes: list[int]) -> ir.Value:
    return shuffle(builder, value, value, lanes)


def spread_number(builder: ir.IRBuilder, number: ir.Value, kind: ir.VectorType) -> ir.Value:
    """Copy a number into every place of a vector."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.IntType(32)(0))
    return _shuffle(builder, one, [0] * kind.count)


def all_of(kind: ir.VectorType, value: float) -> ir.Constant:
    """A vector of one number."""
    return ir.Constant(kind, [value] * kind.count)


def call_llvm(builder: ir.IRBuilder, name: str, kind: ir.Type, *arguments: ir.Value) -> ir.Value:
    """Call LLVM's own function of this name, which returns a value of this kind."""
    function = ir.FunctionType(kind, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}"), arguments)


def folded_by_halves(
    builder: ir.IRBuilder, value: ir.Value, width: int, combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Combine half onto half until `width` numbers are left: in the same order on every machine."""
    size = value.type.count
    while size > width:
        size //= 2
        value = combine(*(_shuffle(builder, value, list(range(i, i + size))) for i in (0, size)))
    return value


def _alternating(kind: ir.VectorType, even: float, odd: float) -> ir.Constant:
    return ir.Constant(kind, [kind.element(odd if lane % 2 else even) for lane in range(kind.count)])


def _parts(builder: ir.IRBuilder, vector: Vector, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the real and imaginary parts of complex x, each twice, and y with the parts of each number swapped."""
    lanes = range(vector.width)
    real = _shuffle(builder, x, [lane - lane % 2 for lane in lanes])
    imaginary = _shuffle(builder, x, [lane + 1 - lane % 2 for lane in lanes])
    return real, imaginary, _shuffle(builder, y, [lane + 1 - 2 * (lane % 2) for lane in lanes])


def _multiply(builder: ir.IRBuilder, vector: Vector, x: ir.Value, y: ir.Value) -> ir.Value:
    if not vector.is_complex:
        return builder.fmul(x, y)
    real, imaginary, swapped = _parts(builder, vector, x, y)
    crossed = builder.fmul(builder.fmul(imaginary, swapped), _alternating(vector.ir, -1.0, 1.0))
    return builder.fadd(builder.fmul(real, y), crossed)


_register_operator(operator.add, lambda builder, vector, x, y: builder.fadd(x, y))
_register_operator(operator.sub, lambda builder, vector, x, y: builder.fsub(x, y))
_register_operator(operator.mul, _multiply)


@intrinsic
def multiply_add(typing_context: Any, x: Any, y: Any, z: Any) -> Any:
    """Give x y + z, rounded once if the machine can."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        name = f"fmuladd.v{x.width}{'f64' if x.is_double else 'f32'}"
        if not x.is_complex:
            return call_llvm(builder, name, x.ir, *args)
        real, imaginary, swapped = _parts(builder, x, *args[:2])
        turned = builder.fmul(imaginary, _alternating(x.ir, -1.0, 1.0))
        return call_llvm(builder, name, x.ir, real, args[1], call_llvm(builder, name, x.ir, turned, swapped, args[2]))

    return x(x, y, z), generate


@intrinsic
def spread(typing_context: Any, x: Any, lanes: Any) -> Any:
    """Copy the one number of vector x into every place of a vector of these lanes."""
    kind = Vector(lanes.lanes)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return _shuffle(builder, args[0], [lane % x.width for lane in range(kind.width)])

    return kind(x, lanes), generate


@intrinsic
def conjugate(typing_context: Any, x: Any) -> Any:
    """Conjugate complex pairs; leave real numbers as they are."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return builder.fmul(args[0], _alternating(x.ir, 1.0, -1.0)) if x.is_complex else args[0]

    return x(x), generate


@intrinsic
def as_real(typing_context: Any, x: Any) -> Any:
    """Take complex pairs for the floats that they are, which then multiply place by place."""
    lanes = Lanes("float64" if x.is_double else "float32", x.width)
    return Vector(lanes)(x), lambda context, builder, sig, args: args[0]


@intrinsic
def as_complex(typing_context: Any, x: Any) -> Any:
    """Make complex pairs of real numbers, with imaginary parts of 0: a vector of twice the width."""
    kind = Vector(Lanes("float64" if x.is_double else "float32", 2 * x.width, True))

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        mask = [lane // 2 + lane % 2 * x.width for lane in range(kind.width)]
        return shuffle(builder, args[0], all_of(x.ir, 0.0), mask)

    return kind(x), generate


@intrinsic
def scaled(typing_context: Any, x: Any, z: Any) -> Any:
    """Multiply complex pairs z by real numbers x, one for each pair, part by part."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return builder.fmul(_shuffle(builder, args[0], [lane // 2 for lane in range(z.width)]), args[1])

    return z(x, z), generate


@intrinsic
def real_parts(typing_context: Any, z: Any) -> Any:
    """Give the real parts of complex pairs: a vector of half the width."""
    kind = Vector(Lanes("float64" if z.is_double else "float32", z.width // 2))

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return _shuffle(builder, args[0], list(range(0, z.width, 2)))

    return kind(z), generate


def _place(builder: ir.IRBuilder, lanes: Lanes, address: ir.Value, index: ir.Value) -> ir.Value:
    return builder.add(address, builder.mul(index, ir.Constant(index.type, lanes.n_bytes)))


def _address(builder: ir.IRBuilder, lanes: Lanes, address: ir.Value, index: ir.Value) -> ir.Value:
    as_bits = ir.VectorType(ir.IntType(16), lanes.width)
    stored = as_bits if lanes.n_bytes == 2 else Vector(lanes).ir
    return builder.inttoptr(_place(builder, lanes, address, index), stored.as_pointer())


def _widen_bfloat16(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    wide = ir.VectorType(ir.IntType(32), bits.type.count)
    shifted = builder.shl(builder.zext(bits, wide), all_of(wide, 16))
    return builder.bitcast(shifted, ir.VectorType(ir.FloatType(), bits.type.count))


def _round_to_bfloat16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    wide = ir.VectorType(ir.IntType(32), value.type.count)
    bits = builder.bitcast(value, wide)
    last_kept_bit = builder.and_(builder.lshr(bits, all_of(wide, 16)), all_of(wide, 1))
    rounded = builder.add(bits, builder.add(last_kept_bit, all_of(wide, 0x7FFF)))
    quiet_nan = all_of(wide, 0x7FC00000)  # rounding could turn a NaN's bits into infinity or zero
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet_nan, rounded)
    narrow = ir.VectorType(ir.IntType(16), value.type.count)
    return builder.trunc(builder.lshr(chosen, all_of(wide, 16)), narrow)


def _widen(builder: ir.IRBuilder, lanes: Lanes, stored: ir.Value) -> ir.Value:
    if lanes.number == "bfloat16":
        return _widen_bfloat16(builder, stored)
    if lanes.number == "float16":
        halves = builder.bitcast(stored, ir.VectorType(ir.HalfType(), lanes.width))
        return builder.fpext(halves, Vector(lanes).ir)
    return stored


def _round(builder: ir.IRBuilder, lanes: Lanes, value: ir.Value) -> ir.Value:
    if lanes.number == "bfloat16":
        return _round_to_bfloat16(builder, value)
    if lanes.number == "float16":
        halves = builder.fptrunc(value, ir.VectorType(ir.HalfType(), lanes.width))
        return builder.bitcast(halves, ir.VectorType(ir.IntType(16), lanes.width))
    return value


@intrinsic
def load(typing_context: Any, address: Any, index: Any, lanes: Any) -> Any:
    """Load the vector that starts `index` floats after `address`."""
    kind: Lanes = lanes.lanes

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        value = builder.load(_address(builder, kind, *args[:2]), align=kind.n_bytes)
        return _widen(builder, kind, value)

    return Vector(kind)(types.int64, types.int64, lanes), generate


@intrinsic
def zeros(typing_context: Any, lanes: Any) -> Any:
    """Return a vector of zeros, of the type that `load` returns."""
    kind = Vector(lanes.lanes)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return all_of(kind.ir, 0.0)

    return kind(lanes), generate


@intrinsic
def total(typing_context: Any, x: Any) -> Any:
    """Sum the numbers of a vector into a vector of one."""
    floats = 2 if x.is_complex else 1
    one = Vector(Lanes("float64" if x.is_double else "float32", floats, x.is_complex))

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return folded_by_halves(builder, args[0], floats, builder.fadd)

    return one(x), generate


@intrinsic
def store(typing_context: Any, address: Any, index: Any, lanes: Any, vector: Any) -> Any:
    """Write `vector`, starting `index` floats after `address`."""
    kind: Lanes = lanes.lanes

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        value = _round(builder, kind, args[3])
        builder.store(value, _address(builder, kind, *args[:2]), align=kind.n_bytes)

    return types.void(types.int64, types.int64, lanes, vector), generate


def fetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Write a prefetch of the cache line at an address."""
    i32, place = ir.IntType(32), builder.inttoptr(address, ir.IntType(8).as_pointer())
    call_llvm(builder, "prefetch.p0", ir.VoidType(), place, i32(0), i32(_PREFETCH_INTO_L2), i32(1))


@intrinsic
def load_part(typing_context: Any, address: Any, index: Any, count: Any, lanes: Any) -> Any:
    """Load like `load`, but only the first `count` floats; the others are 0, and their memory is not touched."""
    kind: Lanes = lanes.lanes

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        at = _address(builder, kind, *args[:2])
        mask, nothing = _first(builder, kind, args[2]), all_of(Vector(kind).ir, 0.0)
        name, size = _masked("load", kind), ir.IntType(32)(kind.n_bytes)
        return call_llvm(builder, name, nothing.type, at, size, mask, nothing)

    return Vector(kind)(types.int64, types.int64, types.int64, lanes), generate


@intrinsic
def store_part(typing_context: Any, address: Any, index: Any, count: Any, lanes: Any, vector: Any) -> Any:
    """Write the first `count` floats of `vector`."""
    kind: Lanes = lanes.lanes

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        at, mask = _address(builder, kind, *args[:2]), _first(builder, kind, args[2])
        name, size = _masked("store", kind), ir.IntType(32)(kind.n_bytes)
        call_llvm(builder, name, ir.VoidType(), args[4], at, size, mask)

    return types.void(types.int64, types.int64, types.int64, lanes, vector), generate


def _masked(what: str, lanes: Lanes) -> str:
    return f"masked.{what}.v{lanes.width}{'f64' if lanes.number == 'float64' else 'f32'}.p0"


def _first(builder: ir.IRBuilder, lanes: Lanes, count: ir.Value) -> ir.Value:
    """The mask of the first `count` lanes, as 32-bit numbers: there can be more lanes than a vector of 64 bits has."""
    kind = ir.VectorType(ir.IntType(32), lanes.width)
    last = spread_number(builder, builder.trunc(count, ir.IntType(32)), kind)
    return builder.icmp_signed("<", ir.Constant(kind, list(range(lanes.width))), last)


@intrinsic
def folded(typing_context: Any, x: Any) -> Any:
    """Sum the registers of a long vector, `WIDTH` floats each, into one vector of `WIDTH`."""
    kind = Vector(Lanes("float64" if x.is_double else "float32", WIDTH, x.is_complex))

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        parts = [_shuffle(builder, args[0], list(range(i, i + WIDTH))) for i in range(0, x.width, WIDTH)]
        while len(parts) > 1:
            parts = [builder.fadd(*pair) if len(pair) == 2 else pair[0] for pair in _pairs(parts)]
        return parts[0]

    return kind(x), generate


def _pairs(parts: list[ir.Value]) -> list[list[ir.Value]]:
    return [parts[i : i + 2] for i in range(0, len(parts), 2)]


@intrinsic
def totals(typing_context: Any, address: Any, lanes: Any) -> Any:
    """Sum each of the vectors that lie one after another from `address` on, as many as a vector has numbers.

    Neighbours are merged, half of each onto half of the other, which takes a fourth of the shuffles of single sums.
    """
    kind: Lanes = lanes.lanes

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        unit, width = 2 if kind.is_complex else 1, kind.width
        at = [builder.add(args[0], ir.Constant(args[0].type, kind.n_bytes * width * i)) for i in range(width // unit)]
        rows = [builder.load(builder.inttoptr(i, Vector(kind).ir.as_pointer()), align=kind.n_bytes) for i in at]
        while len(rows) > 1:
            even = [lane for lane in range(width) if lane // unit % 2 == 0]
            merged = []
            for low, high in _pairs(rows):
                masks = []
                for first in (0, unit):
                    mask = [0] * width
                    for lane in even:
                        mask[lane], mask[lane + unit] = lane + first, width + lane + first
                    masks.append(shuffle(builder, low, high, mask))
                merged.append(builder.fadd(*masks))
            rows, unit = merged, 2 * unit
        return rows[0]

    return Vector(kind)(types.int64, lanes), generate


@intrinsic
def turn(
    typing_context: Any, source: Any, pitch: Any, out: Any, out_pitch: Any, n_rows: Any, n_columns: Any, lanes: Any
) -> Any:
    """Copy a tile of real numbers, rows to columns: up to as many of both as a vector has numbers, in registers.

    A pitch is the number of floats from one row to the next.
    """
    kind: Lanes = lanes.lanes

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        source, pitch, out, out_pitch, n_rows, n_columns, _ = args
        nothing, size = all_of(Vector(kind).ir, 0.0), ir.IntType(32)(kind.n_bytes)
        none = all_of(ir.VectorType(ir.IntType(1), kind.width), 0)

        def row(address: ir.Value, pitch: ir.Value, i: int, count: ir.Value, mask: ir.Value) -> tuple:
            index = ir.Constant(count.type, i)
            there = builder.icmp_signed("<", index, count)
            return _address(builder, kind, address, builder.mul(index, pitch)), builder.select(there, mask, none)

        in_row = _first(builder, kind, n_columns)
        rows = [
            call_llvm(builder, _masked("load", kind), nothing.type, x, size, mask, nothing)
            for x, mask in (row(source, pitch, i, n_rows, in_row) for i in range(kind.width))
        ]
        places, step = range(kind.width), 1
        while step < kind.width:  # blocks of step x step numbers change places
            low = [i if i & step == 0 else kind.width + i - step for i in places]
            high = [i + step if i & step == 0 else kind.width + i for i in places]
            for i in (i for i in places if i & step == 0):
                pair = rows[i], rows[i + step]
                rows[i], rows[i + step] = (shuffle(builder, *pair, lanes) for lanes in (low, high))
            step *= 2
        in_column = _first(builder, kind, n_rows)
        for j, column in enumerate(rows):
            x, mask = row(out, out_pitch, j, n_columns, in_column)
            call_llvm(builder, _masked("store", kind), ir.VoidType(), column, x, size, mask)

    words = (types.int64,) * 6
    return types.void(*words, lanes), generate


@intrinsic
def prefetch(typing_context: Any, address: Any, index: Any, lanes: Any) -> Any:
    """Prefetch the cache line `index` floats after `address`, wherever that is: a prefetch never faults."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
        if lanes.lanes.width < WIDTH:
            return  # the rest of a row shares its cache line with what was prefetched already
        fetch(builder, _place(builder, lanes.lanes, *args[:2]))

    return types.void(types.int64, types.int64, lanes), generate


@intrinsic
def width_of(typing_context: Any, lanes: Any) -> Any:
    """Return the number of floats in a vector of these lanes, as a constant."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        return ir.Constant(ir.IntType(64), lanes.lanes.width)

    return types.int64(lanes), generate
