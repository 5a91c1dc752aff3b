"""A matrix times a few vectors on the CPU, as fast as the memory gives the matrix: y = scale (W x) + bias.

One step of a model multiplies each weight by one number and is done with it, so the time is that of reading the
weights. The general matrix products that torch calls read them at a quarter of the memory's speed when there is one
vector. Here a job walks through neighbouring rows of W from end to end, each with four sums of 16 numbers in flight.

W is kept as float32, bfloat16 or int8 and widened to float32 in registers; sums are float32.
"""

from functools import cache

from numba import prange

from recurra.scan.launch import Kernel
from recurra.scan.vector import WIDTH, Lanes, load, prefetch, store, total, zeros

_UNROLLED = 4 * WIDTH
_AHEAD = 2048  # bytes: how far in front of the walk weights are asked for


@cache
def matvec_kernel(number: str) -> Kernel:
    """Give the kernel for weights of "float32", "bfloat16" or "int8"."""
    weights, weight = Lanes(number, WIDTH), Lanes(number, 1)
    floats, one = Lanes("float32", WIDTH), Lanes("float32", 1)
    size = weights.n_bytes
    ahead = 0 if number == "int8" else _AHEAD // size  # int8 fills a line with four vectors; asking for each costs more

    def multiply(w, scale, bias, x, y, vectors, n_in, n_out, span):  # type: ignore[no-untyped-def]
        """Fill y (vectors, n_out) from w (n_out, n_in) and x (vectors, n_in), addresses; a job takes `span` rows."""
        for job in prange((n_out + span - 1) // span):
            for row in range(job * span, min(n_out, (job + 1) * span)):
                at = w + size * row * n_in
                for vector in range(vectors):
                    x_at = x + 4 * vector * n_in
                    s0, s1, s2, s3 = zeros(floats), zeros(floats), zeros(floats), zeros(floats)
                    i = 0
                    while i + _UNROLLED <= n_in:
                        if ahead:
                            prefetch(at, i + ahead, weights)
                            prefetch(at, i + ahead + WIDTH, weights)
                            prefetch(at, i + ahead + 2 * WIDTH, weights)
                            prefetch(at, i + ahead + 3 * WIDTH, weights)
                        s0 = s0 + load(at, i, weights) * load(x_at, i, floats)
                        s1 = s1 + load(at, i + WIDTH, weights) * load(x_at, i + WIDTH, floats)
                        s2 = s2 + load(at, i + 2 * WIDTH, weights) * load(x_at, i + 2 * WIDTH, floats)
                        s3 = s3 + load(at, i + 3 * WIDTH, weights) * load(x_at, i + 3 * WIDTH, floats)
                        i += _UNROLLED
                    while i + WIDTH <= n_in:
                        s0 = s0 + load(at, i, weights) * load(x_at, i, floats)
                        i += WIDTH
                    rest = zeros(one)
                    while i < n_in:
                        rest = rest + load(at, i, weight) * load(x_at, i, one)
                        i += 1
                    product = total((s0 + s1) + (s2 + s3)) + rest
                    store(y, vector * n_out + row, one, product * load(scale, row, one) + load(bias, row, one))

    return Kernel(multiply)
