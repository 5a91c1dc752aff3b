"""A step's softmax attention to the keys and values of earlier steps, in float32 or int8, each row with its own number.

Keys are kept without their rotation, and only differences of positions matter. So the steps are taken in blocks of 64
by their age: the queries are turned by the age of the block's newest step and the keys back by their place in the
block. The softmax is computed block by block, from the newest, with the largest score so far.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional

from recurra.decoding._codes import encode, load_bytes
from recurra.decoding._tiles import number, word
from recurra.layers.positions import phases
from recurra.ops._toolkit.launch import Apart, compile_inline, compile_part
from recurra.ops._toolkit.vector_math import divide, exp, largest, maximum, write
from recurra.ops._toolkit.vectors import (
    WIDTH,
    Lanes,
    Vector,
    compiles_for,
    load,
    load_part,
    multiply_add,
    prefetch,
    shuffle,
    spread,
    spread_number,
    store,
    store_part,
    total,
    totals,
    width_of,
    zeros,
)

BLOCK = 64  # steps
_LEVELS = 3
MOST_STEPS = BLOCK**_LEVELS
"""Steps to which a row can attend: ages are written in so many digits of base 64."""
_FLOATS, _LONG, _ONE = Lanes("float32", WIDTH), Lanes("float32", 4 * WIDTH), Lanes("float32", 1)


def rotations(d_head: int, n_rotated: int, base: float) -> Float[Tensor, "levels block 2 padded"]:
    """What turns vectors by ages n = 64^level times 0 to 63, or back in level 0; other channels stay.

    With angles theta_j n, cosines stand for both numbers of pair j, then sines, the first of the two with a minus.
    """
    ages = torch.arange(BLOCK, device="cpu") * BLOCK ** torch.arange(_LEVELS, device="cpu")[:, None]
    angles = functional.pad(phases(ages, n_rotated, base), (0, (padded(d_head) - n_rotated) // 2))
    sines = torch.stack([-angles.sin(), angles.sin()], -1)
    sines[0] *= -1
    return torch.stack([angles.cos().repeat_interleave(2, -1), sines.flatten(-2)], -2).float()


def padded(d_head: int) -> int:
    """Return the numbers of a head with those that fill up its last register."""
    return -(-d_head // WIDTH) * WIDTH


def scratch_floats(shared: int, d_head: int) -> int:
    """Return the size of the memory in which the queries of one head of keys compute."""
    return 2 * padded(d_head) * shared + shared * (BLOCK + 2) + BLOCK * (1 + WIDTH * shared)


@intrinsic
def _turned(typing_context: Any, x: Any, cosines: Any, sines: Any) -> Any:
    """Turn pairs of neighbours."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        swapped = shuffle(builder, args[0], args[0], [lane ^ 1 for lane in range(x.width)])
        crossed = builder.fmul(swapped, args[2])
        return write("multiply_add", builder, args[0], args[1], crossed)

    return x(x, cosines, sines), generate


@intrinsic
def _dot(typing_context: Any, address: Any, index: Any, x: Any) -> Any:
    """Multiply x by as many floats, from `index` after `address` on, and add its registers up to one."""
    kind = Vector(_FLOATS)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> ir.Value:
        at, found = builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, 4))), None
        for first in range(0, x.width, WIDTH):
            place = builder.add(at, ir.Constant(at.type, 4 * first))
            factor = builder.load(builder.inttoptr(place, kind.ir.as_pointer()), align=4)
            part = shuffle(builder, args[2], args[2], list(range(first, first + WIDTH)))
            more = () if found is None else (found,)
            found = write("multiply_add" if more else "mul", builder, factor, part, *more)
        return found

    return kind(types.int64, types.int64, x), generate


def _mix_of(n_queries: int, is_int8: bool) -> Callable[..., None]:
    """Make the intrinsic for as many queries, whose weights lie a block apart."""
    columns = 4 if compiles_for("avx512f") else 1

    @intrinsic
    def mix(typing_context: Any, mixed: Any, pitch: Any, weights: Any, values: Any, step: Any, count: Any) -> Any:
        """Add to rows of 64 numbers, `pitch` floats apart, a block's values, each times its weight."""
        floats, size = Vector(_FLOATS).ir, 1 if is_int8 else 4
        kind = ir.VectorType(ir.IntType(8), WIDTH) if is_int8 else floats

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: tuple) -> None:
            mixed, pitch, weights, values, step, count = args

            def at(start: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
                return builder.inttoptr(builder.add(start, ir.Constant(start.type, offset)), kind.as_pointer())

            rows = [builder.add(mixed, builder.mul(pitch, ir.Constant(pitch.type, 4 * q))) for q in range(n_queries)]
            for first in range(0, 4, columns):
                places = [[at(row, 4 * WIDTH * (first + c), floats) for c in range(columns)] for row in rows]
                sums = [[cgutils.alloca_once_value(builder, builder.load(at, align=4)) for at in row] for row in places]
                with cgutils.for_range(builder, count) as loop:
                    start = builder.add(values, builder.mul(loop.index, step))
                    here = builder.add(weights, builder.mul(loop.index, ir.Constant(weights.type, 4)))
                    seen = []
                    for c in range(columns):
                        part = builder.load(at(start, size * WIDTH * (first + c), kind), align=size)
                        whole = ir.VectorType(ir.IntType(32), WIDTH)
                        seen.append(builder.sitofp(builder.sext(part, whole), floats) if is_int8 else part)
                    for q, row in enumerate(sums):
                        one = builder.load(at(here, 4 * BLOCK * q, ir.FloatType()), align=4)
                        weight = spread_number(builder, one, floats)
                        for part, place in zip(seen, row):
                            builder.store(write("multiply_add", builder, weight, part, builder.load(place)), place)
                for row, found in zip(places, sums):
                    for place, value in zip(row, found):
                        builder.store(builder.load(value), place, align=4)

        return types.void(*[types.int64] * 6), generate

    return mix


_mix_four, _mix_two, _mix_one = (_mix_of(n, False) for n in (4, 2, 1))
_mix_four_codes, _mix_two_codes, _mix_one_codes = (_mix_of(n, True) for n in (4, 2, 1))


@compile_inline
def _read(at, i, n, is_int8, lanes):  # type: ignore[no-untyped-def]
    """A vector of a head's n numbers, or of its codes, which are padded."""
    if is_int8:
        return load_bytes(at, i, lanes)
    if i + width_of(lanes) <= n:
        return load(at, i, lanes)
    return load_part(at, i, n - i, lanes)


@compile_part
def _write(at, x, n, wide, is_int8):  # type: ignore[no-untyped-def]
    """Keep a head's n numbers at an address."""
    if is_int8:
        encode(at, x, n, wide, True)
    else:
        for i in range(0, n, WIDTH):
            store_part(at, i, n - i, _FLOATS, load_part(x, i, n - i, _FLOATS))


@compile_inline
def _turn_queries(out, q, turns, block, shared, d, wide):  # type: ignore[no-untyped-def]
    """Turn the queries to the newest step of a block."""
    far, near = turns + 8 * wide * (2 * BLOCK + block // BLOCK), turns + 8 * wide * (BLOCK + block % BLOCK)
    for s in range(shared):
        for i in range(0, wide, WIDTH):
            x = load_part(q, s * d + i, d - i, _FLOATS)
            x = _turned(x, load(far, i, _FLOATS), load(far, wide + i, _FLOATS))
            store(out, s * wide + i, _FLOATS, _turned(x, load(near, i, _FLOATS), load(near, wide + i, _FLOATS)))


@compile_inline
def _weigh(scores, count, most, sums):  # type: ignore[no-untyped-def]
    """Turn the scores of a block into weights, given the largest score so far, and add them to their sum.

    Returns what the sums so far are to be multiplied by.
    """
    for i in range(count, (count + WIDTH - 1) // WIDTH * WIDTH):
        store(scores, i, _ONE, load(scores, 0, _ONE))  # a number that is no larger than the largest
    before = load(most, 0, _ONE)
    peaks = spread(before, _FLOATS)
    for i in range(0, count, WIDTH):
        peaks = maximum(peaks, load(scores, i, _FLOATS))
    peak = largest(peaks)
    store(most, 0, _ONE, peak)
    added = zeros(_ONE)
    for i in range(0, count, WIDTH):
        store(scores, i, _FLOATS, exp(load(scores, i, _FLOATS) - spread(peak, _FLOATS)))
        added = added + total(load_part(scores, i, count - i, _FLOATS))
    factor = exp(before - peak)
    store(sums, 0, _ONE, multiply_add(load(sums, 0, _ONE), factor, added))
    return factor


@compile_inline
def _score(scores, turned, keys, step, count, turns, scratch, shared, d, wide, is_int8, lanes):  # type: ignore[no-untyped-def]
    """Multiply the keys of a block by the queries."""
    scales, sums = scratch, scratch + 4 * BLOCK
    for j in range(count):
        at, back = keys + j * step, turns + 8 * wide * (count - 1 - j)
        for i in range(0, wide, width_of(lanes)):
            key = _turned(_read(at, i, d, is_int8, lanes), load(back, i, lanes), load(back, wide + i, lanes))
            for s in range(shared):
                place, part = WIDTH * (s * BLOCK + j), _dot(turned, s * wide + i, key)
                store(sums, place, _FLOATS, load(sums, place, _FLOATS) + part if i else part)
        if is_int8:
            store(scales, j, _ONE, load(at + wide, 0, _ONE))
    for s in range(shared):
        for j in range(0, count, WIDTH):
            found = totals(sums + 4 * WIDTH * (s * BLOCK + j), _FLOATS)
            store(scores, s * BLOCK + j, _FLOATS, found * load(scales, j, _FLOATS) if is_int8 else found)


@compile_inline
def _mix_long(mixed, weights, values, step, count, shared, wide, is_int8):  # type: ignore[no-untyped-def]
    """Add the values of a block, each times its weight; heads have a multiple of 64 numbers."""
    for i in range(0, wide, 4 * WIDTH):
        s = 0
        while s < shared:
            at, w = mixed + 4 * (s * wide + i), weights + 4 * s * BLOCK
            if shared - s >= 4:
                if is_int8:
                    _mix_four_codes(at, wide, w, values + i, step, count)
                else:
                    _mix_four(at, wide, w, values + 4 * i, step, count)
                s += 4
            elif shared - s >= 2:
                if is_int8:
                    _mix_two_codes(at, wide, w, values + i, step, count)
                else:
                    _mix_two(at, wide, w, values + 4 * i, step, count)
                s += 2
            else:
                if is_int8:
                    _mix_one_codes(at, wide, w, values + i, step, count)
                else:
                    _mix_one(at, wide, w, values + 4 * i, step, count)
                s += 1


@compile_inline
def _mix(mixed, weights, values, step, count, d, wide, is_int8):  # type: ignore[no-untyped-def]
    """The same for one query, and heads of any size."""
    for i in range(0, wide, WIDTH):
        value = load(mixed, i, _FLOATS)
        for j in range(count):
            seen = _read(values + j * step, i, d, is_int8, _FLOATS)
            value = multiply_add(spread(load(weights, j, _ONE), _FLOATS), seen, value)
        store(mixed, i, _FLOATS, value)


@compile_inline
def _begin(scratch, shared, wide):  # type: ignore[no-untyped-def]
    """Prepare the memory of the queries of one head of keys: nothing mixed, sums of 0, largest scores of -inf."""
    sums = scratch + 4 * (2 * wide + BLOCK) * shared
    for i in range(0, wide * shared, WIDTH):
        store(scratch + 4 * wide * shared, i, _FLOATS, zeros(_FLOATS))
    for s in range(shared):
        store(sums, s, _ONE, zeros(_ONE))
        store(sums, shared + s, _ONE, zeros(_ONE) - divide(number(1, _ONE), zeros(_ONE)))


@compile_part
def _attend(q, k, v, step, count, block, turns, scratch, shared, d, wide, is_int8):  # type: ignore[no-untyped-def]
    """Attend to a block of `count` steps, `step` bytes apart, for the queries of one head of keys."""
    for j in range(count):  # of the block that comes next
        for i in range(0, wide if is_int8 else 4 * wide, 64):
            prefetch(k + (j - BLOCK) * step + i, 0, _FLOATS)
            prefetch(v + (j - BLOCK) * step + i, 0, _FLOATS)
    turned, mixed = scratch, scratch + 4 * wide * shared
    scores = mixed + 4 * wide * shared
    sums, most = scores + 4 * BLOCK * shared, scores + 4 * (BLOCK + 1) * shared
    rest, is_long = most + 4 * shared, d % width_of(_LONG) == 0
    _turn_queries(turned, q, turns, block, shared, d, wide)
    if is_long:
        _score(scores, turned, k, step, count, turns, rest, shared, d, wide, is_int8, _LONG)
    else:
        _score(scores, turned, k, step, count, turns, rest, shared, d, wide, is_int8, _FLOATS)
    if is_int8:
        for j in range(count):
            store(rest, j, _ONE, load(v + j * step + wide, 0, _ONE))
    for s in range(shared):
        weights = scores + 4 * s * BLOCK
        factor = spread(_weigh(weights, count, most + 4 * s, sums + 4 * s), _FLOATS)
        for i in range(0, wide, WIDTH):
            store(mixed, s * wide + i, _FLOATS, load(mixed, s * wide + i, _FLOATS) * factor)
        if is_int8:
            for j in range(0, count, WIDTH):
                store(weights, j, _FLOATS, load(weights, j, _FLOATS) * load(rest, j, _FLOATS))
        if not is_long:
            _mix(mixed + 4 * s * wide, weights, v, step, count, d, wide, is_int8)
    if is_long:
        _mix_long(mixed, scores, v, step, count, shared, wide, is_int8)


@compile_inline
def _finish(out, scratch, shared, d, wide):  # type: ignore[no-untyped-def]
    mixed, sums = scratch + 4 * wide * shared, scratch + 4 * (2 * wide + BLOCK) * shared
    for s in range(shared):
        for i in range(0, d, WIDTH):
            value = divide(load(mixed, s * wide + i, _FLOATS), spread(load(sums, s, _ONE), _FLOATS))
            store_part(out, s * d + i, d - i, _FLOATS, value)


def _attend_share(out, q, k, v, rows, turns, scratch, n_rows, n_heads, n_kv_heads, d, head, job, jobs):  # type: ignore[no-untyped-def]
    """The share of one job in the heads of keys of all rows; `head` is the number of bytes of a head of a step.

    A block of a row is read for all heads, which lie side by side, before the next.
    """
    shared, wide, step = n_heads // n_kv_heads, (d + WIDTH - 1) // WIDTH * WIDTH, n_kv_heads * head
    room = 4 * (2 * wide * shared + shared * (BLOCK + 2) + BLOCK * (1 + WIDTH * shared))
    units, is_int8 = n_rows * n_kv_heads, head != 4 * d
    start, stop = units * job // jobs, units * (job + 1) // jobs
    while start < stop:
        row = start // n_kv_heads
        end = min(stop, (row + 1) * n_kv_heads)
        keys, values, n = word(rows + 24 * row, 0), word(rows + 24 * row, 1), word(rows + 24 * row, 2)
        for unit in range(start, end):
            offset = (n - 1) * step + head * (unit % n_kv_heads)
            _write(keys + offset, k + 4 * unit * d, d, wide, is_int8)
            _write(values + offset, v + 4 * unit * d, d, wide, is_int8)
            _begin(scratch + room * unit, shared, wide)
        for block in range((n + BLOCK - 1) // BLOCK):
            first = max(0, n - BLOCK * (block + 1))
            for unit in range(start, end):
                at, count = first * step + head * (unit % n_kv_heads), n - BLOCK * block - first
                here, heads = scratch + room * unit, q + 4 * unit * shared * d
                _attend(heads, keys + at, values + at, step, count, block, turns, here, shared, d, wide, is_int8)
        for unit in range(start, end):
            _finish(out + 4 * unit * shared * d, scratch + room * unit, shared, d, wide)
        start = end
    return 0


attend_share = Apart(_attend_share)
