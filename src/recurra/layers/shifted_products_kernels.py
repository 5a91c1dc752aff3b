"""A short convolution a channel on the CPU: one walk over time forward, and one for all gradients.

A job is a span of channels of one sequence. The few rows that meet in a step, the weights and the sums of their
gradients stay in the first-level cache. Everything is float32; x comes with strides in floats, all else is dense.
"""

from functools import cache

from numba import prange

from recurra.kernels.launch import Kernel, KernelPair, compile_inline
from recurra.kernels.vector import WIDTH, Lanes, load_part, multiply_add, store_part, zeros

_LONG = 4 * WIDTH
_LANES = Lanes("float32", _LONG)


@compile_inline
def _input(x, x_time, state, at, n_before, row):  # type: ignore[no-untyped-def]
    """Find the input `at` steps after the first of those in the state."""
    return state + 4 * at * row if at < n_before else x + 4 * (at - n_before) * x_time


def _forward(x, state, weight, bias, y, batch, length, n_weights, row, span):  # type: ignore[no-untyped-def]
    """y_t = bias + sum_k weight_k x_{t - K + 1 + k}."""
    (x_start, x_batch, x_time), spans = x, (row + span - 1) // span
    for job in prange(batch * spans):
        sequence, start = job // spans, job % spans * span
        stop, inputs = min(row, start + span), x_start + 4 * sequence * x_batch
        before, out = state + 4 * sequence * (n_weights - 1) * row, y + 4 * sequence * length * row
        for t in range(length):
            for i in range(start, stop, _LONG):
                rest = stop - i
                found = load_part(bias, i, rest, _LANES)
                for k in range(n_weights):
                    x_k = load_part(_input(inputs, x_time, before, t + k, n_weights - 1, row), i, rest, _LANES)
                    found = multiply_add(x_k, load_part(weight + 4 * k * row, i, rest, _LANES), found)
                store_part(out + 4 * t * row, i, rest, _LANES, found)


def _backward(x, state, weight, g, d_x, d_state, d_weight, batch, length, n_weights, row, span):  # type: ignore[no-untyped-def]
    """`d_weight` has room for each sequence's sums, of the weights and then of the bias, and comes as zeros."""
    (x_start, x_batch, x_time), spans = x, (row + span - 1) // span
    for job in prange(batch * spans):
        sequence, start = job // spans, job % spans * span
        stop, n_before, inputs = min(row, start + span), n_weights - 1, x_start + 4 * sequence * x_batch
        before, to_before = state + 4 * sequence * n_before * row, d_state + 4 * sequence * n_before * row
        given, to_x = g + 4 * sequence * length * row, d_x + 4 * sequence * length * row
        sums = d_weight + 4 * sequence * (n_weights + 1) * row
        for at in range(length + n_before):
            target = _input(to_x, row, to_before, at, n_before, row)
            first, last = max(0, at - length + 1), min(n_before, at)
            for i in range(start, stop, _LONG):
                rest, found = stop - i, zeros(_LANES)
                for k in range(first, last + 1):
                    g_k = load_part(given + 4 * (at - k) * row, i, rest, _LANES)
                    found = multiply_add(g_k, load_part(weight + 4 * k * row, i, rest, _LANES), found)
                store_part(target, i, rest, _LANES, found)
            for i in range(start, stop if at < length else start, _LONG):
                rest = stop - i
                g_t, of_bias = load_part(given + 4 * at * row, i, rest, _LANES), sums + 4 * n_weights * row
                store_part(of_bias, i, rest, _LANES, load_part(of_bias, i, rest, _LANES) + g_t)
                for k in range(n_weights):
                    x_k = load_part(_input(inputs, x_time, before, at + k, n_before, row), i, rest, _LANES)
                    of_k = sums + 4 * k * row
                    store_part(of_k, i, rest, _LANES, multiply_add(g_t, x_k, load_part(of_k, i, rest, _LANES)))


@cache
def shifted_products_kernels() -> KernelPair:
    """Return the kernels, which compile when first called."""
    return KernelPair(Kernel(_forward), Kernel(_backward))
