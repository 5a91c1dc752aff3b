"""A matrix times a few vectors on the CPU, as fast as memory delivers the matrix: y = scale (W x) + bias.

One step of a model uses each weight once, so the time is that of reading the weights. The general matrix products that
torch calls read them at a quarter of the memory's speed when there is one vector. Here a job walks through neighbouring
rows of W from end to end, each with four sums of 16 numbers in flight.

W is kept as float32, bfloat16 or int8 and widened to float32 in registers. Sums are float32. Where the machine can, a
product and its sum are rounded once: widening keeps the machine busy, and for int8 saving that operation saves a sixth
of the time.
"""

from functools import cache
from typing import NamedTuple

from numba import prange

from recurra.decoding.vector_math import multiply_add
from recurra.kernels.launch import Kernel, compile_inline
from recurra.kernels.vector import WIDTH, Lanes, load, prefetch, store, total, zeros

_UNROLLED = 4 * WIDTH
_AHEAD = 2048  # bytes: how far ahead of the walk weights are fetched
_FLOATS, _ONE = Lanes("float32", WIDTH), Lanes("float32", 1)


class Weights(NamedTuple):
    """How `multiply_rows` reads weights of one kind."""

    many: Lanes
    one: Lanes
    ahead: int
    """How many weights ahead of the walk to fetch; 0 for none."""


def rows_of(number: str) -> Weights:
    """Describe weights of "float32", "bfloat16" or "int8"."""
    many = Lanes(number, WIDTH)
    # int8 fills a cache line with four vectors; a fetch for each costs more than it saves
    return Weights(many, Lanes(number, 1), 0 if number == "int8" else _AHEAD // many.n_bytes)


@compile_inline
def multiply_rows(w, scale, bias, x, y, vectors, n_in, n_out, first, last, size, ahead, weights, weight):  # type: ignore[no-untyped-def]
    """Fill places `first` to `last` of y (vectors, n_out) from w (n_out, n_in), numbers of `size` bytes, and x."""
    for row in range(first, last):
        at = w + size * row * n_in
        for vector in range(vectors):
            x_at = x + 4 * vector * n_in
            s0, s1, s2, s3 = zeros(_FLOATS), zeros(_FLOATS), zeros(_FLOATS), zeros(_FLOATS)
            i = 0
            while i + _UNROLLED <= n_in:
                if ahead:
                    prefetch(at, i + ahead, weights)
                    prefetch(at, i + ahead + WIDTH, weights)
                    prefetch(at, i + ahead + 2 * WIDTH, weights)
                    prefetch(at, i + ahead + 3 * WIDTH, weights)
                s0 = multiply_add(load(at, i, weights), load(x_at, i, _FLOATS), s0)
                s1 = multiply_add(load(at, i + WIDTH, weights), load(x_at, i + WIDTH, _FLOATS), s1)
                s2 = multiply_add(load(at, i + 2 * WIDTH, weights), load(x_at, i + 2 * WIDTH, _FLOATS), s2)
                s3 = multiply_add(load(at, i + 3 * WIDTH, weights), load(x_at, i + 3 * WIDTH, _FLOATS), s3)
                i += _UNROLLED
            while i + WIDTH <= n_in:
                s0 = multiply_add(load(at, i, weights), load(x_at, i, _FLOATS), s0)
                i += WIDTH
            rest = zeros(_ONE)
            while i < n_in:
                rest = multiply_add(load(at, i, weight), load(x_at, i, _ONE), rest)
                i += 1
            product = total((s0 + s1) + (s2 + s3)) + rest
            store(y, vector * n_out + row, _ONE, product * load(scale, row, _ONE) + load(bias, row, _ONE))


@cache
def matvec_kernel(number: str) -> Kernel:
    """Return the kernel for weights of "float32", "bfloat16" or "int8"."""
    weights, weight, ahead = rows_of(number)
    size = weights.n_bytes

    def multiply(w, scale, bias, x, y, vectors, n_in, n_out, span):  # type: ignore[no-untyped-def]
        """Fill y (vectors, n_out) from w (n_out, n_in) and x (vectors, n_in), addresses; a job takes `span` rows."""
        for job in prange((n_out + span - 1) // span):
            first, last = job * span, min(n_out, (job + 1) * span)
            multiply_rows(w, scale, bias, x, y, vectors, n_in, n_out, first, last, size, ahead, weights, weight)

    return Kernel(multiply)
