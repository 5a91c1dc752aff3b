"""CPU kernels of layers: cross-entropy, positive features, short convolutions, and Mamba-3's turned B and C."""

from functools import cache

from numba import prange

from recurra.ops._toolkit.launch import Kernel, KernelPair, compile_inline
from recurra.ops._toolkit.vector_math import exp, largest, maximum
from recurra.ops._toolkit.vectors import (
    WIDTH,
    Lanes,
    as_real,
    conjugate,
    folded,
    load,
    load_part,
    multiply_add,
    spread,
    store,
    store_part,
    total,
    width_of,
    zeros,
)

_LONG = 4 * WIDTH
_FLOATS, _WIDE, _ONE = Lanes("float32", _LONG), Lanes("float32", WIDTH), Lanes("float32", 1)
_PAIRS = Lanes("float32", WIDTH, is_complex=True)

# The cross-entropy of many classes on the CPU: two walks over each row forward, and one backward.
# A row is the logits of one position. It stays in the cache between the two walks, and bfloat16 is widened on its way
# into registers: nothing of the size of the logits is written forward, nor kept for the backward pass. Rows are
# dense.


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
    size = one.n_bytes

    def forward(logits, largest_of, sums, rows, columns):  # type: ignore[no-untyped-def]
        stop = columns // _LONG * _LONG
        for row in prange(rows):
            x = logits + size * row * columns
            first = load(x, 0, one)
            most = maximum(
                largest(_most(x, 0, stop, spread(first, _FLOATS), long)), _most(x, stop, columns, first, one)
            )
            wide = _add_powers(x, 0, stop, spread(most, _FLOATS), zeros(_FLOATS), long)
            rest = _add_powers(x, stop, columns, most, zeros(_ONE), one)
            store(largest_of, row, _ONE, most)
            store(sums, row, _ONE, total(folded(wide)) + rest)

    def backward(logits, largest_of, log_sums, scales, out, rows, columns):  # type: ignore[no-untyped-def]
        stop = columns // _LONG * _LONG
        for row in prange(rows):
            x, to = logits + size * row * columns, out + size * row * columns
            most, log_sum, scale = load(largest_of, row, _ONE), load(log_sums, row, _ONE), load(scales, row, _ONE)
            _write_shares(x, to, 0, stop, spread(most, _FLOATS), spread(log_sum, _FLOATS), spread(scale, _FLOATS), long)
            _write_shares(x, to, stop, columns, most, log_sum, scale, one)

    return KernelPair(Kernel(forward), Kernel(backward))


# The positive random features of a Performer on the CPU, in one walk over time.
# A job is one head of one sequence. The running maxima of its features stay in the first-level cache, and so does the
# row of scores between the search for its largest and the exponential. Everything is float32 and dense: (B, L, H, m).


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


@Kernel
def walk_features(q, k, less, peak, queries, keys, decay, batch, length, heads, size):  # type: ignore[no-untyped-def]
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


# A short convolution a channel on the CPU: one walk over time forward, and one for all gradients.
# A job is a span of channels of one sequence. The few rows that meet in a step, the weights and the sums of their
# gradients stay in the first-level cache. Everything is float32; x comes with strides in floats, all else is dense.


@compile_inline
def _input(x, x_time, state, at, n_before, row):  # type: ignore[no-untyped-def]
    """Find the input `at` steps after the first of those in the state."""
    return state + 4 * at * row if at < n_before else x + 4 * (at - n_before) * x_time


@Kernel
def shifted_forward(x, state, weight, bias, y, batch, length, n_weights, row, span):  # type: ignore[no-untyped-def]
    """y_t = bias + sum_k weight_k x_{t - K + 1 + k}."""
    (x_start, x_batch, x_time), spans = x, (row + span - 1) // span
    for job in prange(batch * spans):
        sequence, start = job // spans, job % spans * span
        stop, inputs = min(row, start + span), x_start + 4 * sequence * x_batch
        before, out = state + 4 * sequence * (n_weights - 1) * row, y + 4 * sequence * length * row
        for t in range(length):
            for i in range(start, stop, _LONG):
                rest = stop - i
                found = load_part(bias, i, rest, _FLOATS)
                for k in range(n_weights):
                    x_k = load_part(_input(inputs, x_time, before, t + k, n_weights - 1, row), i, rest, _FLOATS)
                    found = multiply_add(x_k, load_part(weight + 4 * k * row, i, rest, _FLOATS), found)
                store_part(out + 4 * t * row, i, rest, _FLOATS, found)


@Kernel
def shifted_backward(x, state, weight, g, d_x, d_state, d_weight, batch, length, n_weights, row, span):  # type: ignore[no-untyped-def]
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
                rest, found = stop - i, zeros(_FLOATS)
                for k in range(first, last + 1):
                    g_k = load_part(given + 4 * (at - k) * row, i, rest, _FLOATS)
                    found = multiply_add(g_k, load_part(weight + 4 * k * row, i, rest, _FLOATS), found)
                store_part(target, i, rest, _FLOATS, found)
            for i in range(start, stop if at < length else start, _LONG):
                rest = stop - i
                g_t, of_bias = load_part(given + 4 * at * row, i, rest, _FLOATS), sums + 4 * n_weights * row
                store_part(of_bias, i, rest, _FLOATS, load_part(of_bias, i, rest, _FLOATS) + g_t)
                for k in range(n_weights):
                    x_k = load_part(_input(inputs, x_time, before, at + k, n_before, row), i, rest, _FLOATS)
                    of_k = sums + 4 * k * row
                    store_part(of_k, i, rest, _FLOATS, multiply_add(g_t, x_k, load_part(of_k, i, rest, _FLOATS)))


# B and C of Mamba-3 turned by angles, and their products, in one walk over rows.
# A row is a head at a step. Its first `turning` floats are pairs (real, imaginary), which are multiplied by `unit`;
# the rest stay. Everything is float32 and dense. A job is a span of rows.


@Kernel
def turned_forward(b, c, unit, scale, b_turned, c_turned, dots, rows, size, turning, span):  # type: ignore[no-untyped-def]
    """b_turned = scale b unit, c_turned = c unit, dots = b . c."""
    for job in prange((rows + span - 1) // span):
        for row in range(job * span, min(rows, (job + 1) * span)):
            at, unit_t, dot = 4 * row * size, unit + 4 * row * turning, zeros(_WIDE)
            s = spread(load(scale, row, _ONE), _WIDE)
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


@Kernel
def turned_backward(  # type: ignore[no-untyped-def]
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
