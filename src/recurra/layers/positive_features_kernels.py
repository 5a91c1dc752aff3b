"""The positive random features of a Performer on the CPU, in one walk over time.

A job is one head of one sequence. The running maxima of its features stay in the first-level cache, and so does the row
of scores between the search for its largest and the exponential. Everything is float32 and dense: (B, L, H, m).
"""

from functools import cache

from numba import prange

from recurra.kernels.launch import Kernel, compile_inline
from recurra.kernels.vector import WIDTH, Lanes, load, load_part, spread, store_part
from recurra.kernels.vector_math import exp, largest, maximum

_WIDE, _ONE = Lanes("float32", WIDTH), Lanes("float32", 1)


@compile_inline
def _largest_of(row, size):  # type: ignore[no-untyped-def]
    if size < WIDTH:
        one = load(row, 0, _ONE)
        for i in range(1, size):
            one = maximum(one, load(row, i, _ONE))
        return one
    most = load(row, size - WIDTH, _WIDE)
    for i in range(0, size - WIDTH, WIDTH):
        most = maximum(most, load(row, i, _WIDE))
    return largest(most)


def _features(q, k, less, peak, queries, keys, decay, batch, length, heads, size):  # type: ignore[no-untyped-def]
    """`peak` has the maxima before the first step, and at the end those of the last."""
    for job in prange(batch * heads):
        sequence, head = job // heads, job % heads
        most_of = peak + 4 * job * size
        for t in range(length):
            row = (sequence * length + t) * heads + head
            at, norm = 4 * row * size, spread(load(less, row, _ONE), _WIDE)
            for i in range(0, size, WIDTH):
                rest = size - i
                exponent, before = load_part(k + at, i, rest, _WIDE) - norm, load_part(most_of, i, rest, _WIDE)
                now = maximum(before, exponent)
                store_part(most_of, i, rest, _WIDE, now)
                store_part(decay + at, i, rest, _WIDE, exp(before - now))
                store_part(keys + at, i, rest, _WIDE, exp(exponent - now))
                store_part(queries + at, i, rest, _WIDE, load_part(q + at, i, rest, _WIDE) + now)
            most = spread(_largest_of(queries + at, size), _WIDE)
            for i in range(0, size, WIDTH):
                rest = size - i
                store_part(queries + at, i, rest, _WIDE, exp(load_part(queries + at, i, rest, _WIDE) - most))


@cache
def positive_features_kernel() -> Kernel:
    """Return the kernel, which compiles when first called."""
    return Kernel(_features)
