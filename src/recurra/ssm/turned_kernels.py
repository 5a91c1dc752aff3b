"""B and C of Mamba-3 turned by angles, and their products, in one walk over rows: one kernel forward, one backward.

A row is a head at a step. Its first `turning` floats are pairs (real, imaginary), which are multiplied by `unit`; the
rest stay. Everything is float32 and dense. A job is a span of rows.
"""

from functools import cache

from numba import prange

from recurra.kernels.launch import Kernel, KernelPair
from recurra.kernels.vector import (
    WIDTH,
    Lanes,
    as_real,
    conjugate,
    load,
    load_part,
    spread,
    store,
    store_part,
    total,
    zeros,
)

_WIDE, _PAIRS, _ONE = Lanes("float32", WIDTH), Lanes("float32", WIDTH, is_complex=True), Lanes("float32", 1)


def _forward(b, c, unit, scale, b_turned, c_turned, dots, rows, size, turning, span):  # type: ignore[no-untyped-def]
    """b_turned = scale b unit, c_turned = c unit, dots = b . c."""
    for job in prange((rows + span - 1) // span):
        for row in range(job * span, min(rows, (job + 1) * span)):
            at, unit_t, s, dot = 4 * row * size, unit + 4 * row * turning, load(scale, row, _ONE), zeros(_WIDE)
            s = spread(s, _WIDE)
            for i in range(0, turning, WIDTH):
                rest = turning - i
                u, b_i = load_part(unit_t, i, rest, _PAIRS), load_part(b + at, i, rest, _PAIRS)
                c_i = load_part(c + at, i, rest, _PAIRS)
                store_part(b_turned + at, i, rest, _WIDE, as_real(b_i * u) * s)
                store_part(c_turned + at, i, rest, _PAIRS, c_i * u)
                dot = dot + as_real(b_i) * as_real(c_i)
            for i in range(turning, size, WIDTH):
                rest = size - i
                still, c_still = load_part(b + at, i, rest, _WIDE), load_part(c + at, i, rest, _WIDE)
                store_part(b_turned + at, i, rest, _WIDE, still * s)
                store_part(c_turned + at, i, rest, _WIDE, c_still)
                dot = dot + still * c_still
            store(dots, row, _ONE, total(dot))


def _backward(  # type: ignore[no-untyped-def]
    b, c, unit, scale, g_b, g_c, g_dots, d_b, d_c, d_pairs, d_scale, rows, size, turning, span
):
    """The imaginary parts of d_pairs are the gradients of the angles."""
    for job in prange((rows + span - 1) // span):
        for row in range(job * span, min(rows, (job + 1) * span)):
            at, wide, sums = 4 * row * size, 4 * row * turning, zeros(_WIDE)
            s, g = spread(load(scale, row, _ONE), _WIDE), spread(load(g_dots, row, _ONE), _WIDE)
            for i in range(0, turning, WIDTH):
                rest = turning - i
                back = conjugate(load_part(unit + wide, i, rest, _PAIRS))
                b_i, c_i = load_part(b + at, i, rest, _PAIRS), load_part(c + at, i, rest, _PAIRS)
                to_b, to_c = load_part(g_b + at, i, rest, _PAIRS) * back, load_part(g_c + at, i, rest, _PAIRS) * back
                store_part(d_b + at, i, rest, _WIDE, as_real(to_b) * s + as_real(c_i) * g)
                store_part(d_c + at, i, rest, _WIDE, as_real(to_c) + as_real(b_i) * g)
                turned = as_real(conjugate(b_i) * to_b) * s + as_real(conjugate(c_i) * to_c)
                store_part(d_pairs + wide, i, rest, _WIDE, turned)
                sums = sums + as_real(to_b) * as_real(b_i)
            for i in range(turning, size, WIDTH):
                rest = size - i
                still, c_still = load_part(b + at, i, rest, _WIDE), load_part(c + at, i, rest, _WIDE)
                to_still = load_part(g_b + at, i, rest, _WIDE)
                store_part(d_b + at, i, rest, _WIDE, to_still * s + c_still * g)
                store_part(d_c + at, i, rest, _WIDE, load_part(g_c + at, i, rest, _WIDE) + still * g)
                sums = sums + to_still * still
            store(d_scale, row, _ONE, total(sums))


@cache
def turned_kernels() -> KernelPair:
    """Return the kernels, which compile when first called."""
    return KernelPair(Kernel(_forward), Kernel(_backward))
