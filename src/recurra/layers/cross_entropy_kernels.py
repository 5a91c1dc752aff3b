"""The cross-entropy of many classes on the CPU: two walks over each row forward, and one backward.

A row is the logits of one position. It stays in the cache between the two walks, and bfloat16 is widened on its way
into registers: nothing of the size of the logits is written forward, nor kept for the backward pass. Rows are dense.
"""

from functools import cache

from numba import prange

from recurra.kernels.launch import Kernel, KernelPair, compile_inline
from recurra.kernels.vector import WIDTH, Lanes, folded, load, spread, store, total, width_of, zeros
from recurra.kernels.vector_math import exp, largest, maximum

_LONG, _ONE = 4 * WIDTH, Lanes("float32", 1)


@compile_inline
def _most(x, start, stop, found, lanes):  # type: ignore[no-untyped-def]
    for i in range(start, stop, width_of(lanes)):
        found = maximum(found, load(x, i, lanes))
    return found


@compile_inline
def _add_powers(x, start, stop, most, found, lanes):  # type: ignore[no-untyped-def]
    for i in range(start, stop, width_of(lanes)):
        found = found + exp(load(x, i, lanes) - most)
    return found


@compile_inline
def _write_shares(x, out, start, stop, most, log_sum, scale, lanes):  # type: ignore[no-untyped-def]
    for i in range(start, stop, width_of(lanes)):
        store(out, i, lanes, scale * exp(load(x, i, lanes) - most - log_sum))


@cache
def cross_entropy_kernels(number: str) -> KernelPair:
    """Return the kernels for logits of float32 or bfloat16; they compile when first called.

    forward: each row's largest logit and sum_j exp(x_j - largest). backward: scale exp(x_j - largest - log_sum). In
    this order, because largest + log_sum would keep few digits of log_sum where logits are large.
    """
    long, one = Lanes(number, _LONG), Lanes(number, 1)
    floats, size = Lanes("float32", _LONG), one.n_bytes

    def forward(logits, largest_of, sums, rows, columns):  # type: ignore[no-untyped-def]
        stop = columns // _LONG * _LONG
        for row in prange(rows):
            x = logits + size * row * columns
            first = load(x, 0, one)
            most = maximum(largest(_most(x, 0, stop, spread(first, floats), long)), _most(x, stop, columns, first, one))
            wide = _add_powers(x, 0, stop, spread(most, floats), zeros(floats), long)
            rest = _add_powers(x, stop, columns, most, zeros(_ONE), one)
            store(largest_of, row, _ONE, most)
            store(sums, row, _ONE, total(folded(wide)) + rest)

    def backward(logits, largest_of, log_sums, scales, out, rows, columns):  # type: ignore[no-untyped-def]
        stop = columns // _LONG * _LONG
        for row in prange(rows):
            x, to = logits + size * row * columns, out + size * row * columns
            most, log_sum, scale = load(largest_of, row, _ONE), load(log_sums, row, _ONE), load(scales, row, _ONE)
            _write_shares(x, to, 0, stop, spread(most, floats), spread(log_sum, floats), spread(scale, floats), long)
            _write_shares(x, to, stop, columns, most, log_sum, scale, one)

    return KernelPair(Kernel(forward), Kernel(backward))
