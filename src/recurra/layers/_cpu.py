"""CPU kernels of layers: cross-entropy, features, short convolutions, gated norms, and Mamba-3's turned B and C."""

from functools import cache

from recurra.ops._toolkit.launch import Kernel, KernelPair, compile_inline
from recurra.ops._toolkit.vector_math import divide, exp, largest, maximum, sigmoid, sqrt
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

    def forward(logits, largest_of, sums, rows, columns, share):  # type: ignore[no-untyped-def]
        stop = columns // _LONG * _LONG
        for row in range(share[0], share[1]):
            x = logits + size * row * columns
            first = load(x, 0, one)
            most = maximum(
                largest(_most(x, 0, stop, spread(first, _FLOATS), long)), _most(x, stop, columns, first, one)
            )
            wide = _add_powers(x, 0, stop, spread(most, _FLOATS), zeros(_FLOATS), long)
            rest = _add_powers(x, stop, columns, most, zeros(_ONE), one)
            store(largest_of, row, _ONE, most)
            store(sums, row, _ONE, total(folded(wide)) + rest)

    def backward(logits, largest_of, log_sums, scales, out, rows, columns, share):  # type: ignore[no-untyped-def]
        stop = columns // _LONG * _LONG
        for row in range(share[0], share[1]):
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
def walk_features(q, k, less, peak, queries, keys, decay, batch, length, heads, size, share):  # type: ignore[no-untyped-def]
    """`peak` has the maxima before the first step, and at the end those of the last."""
    for job in range(share[0], share[1]):
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


def width_for(row: int) -> int:
    """Return the floats in a vector for rows of this size: several registers, so that exponentials overlap."""
    return _LONG if row % _LONG == 0 else WIDTH


# A short convolution a channel on the CPU, with SiLU after it or not: one walk over time forward, and one for all
# gradients, which computes the convolution again.
# A job is a span of channels of one sequence. The few rows that meet in a step, the weights and the sums of their
# gradients stay in the first-level cache. x comes in float32 or bfloat16, with strides in numbers, and so leaves its
# gradient; all else is float32 and dense.


@compile_inline
def _tap(x, x_time, state, at, n_before, row, i, number, lanes):  # type: ignore[no-untyped-def]
    """Load the input `at` steps after the first of those in the state."""
    if at < n_before:
        return load(state + 4 * at * row, i, lanes)
    return load(x, (at - n_before) * x_time + i, number)


@compile_inline
def _convolved(x, x_time, state, weight, bias, t, n_weights, row, i, number, lanes):  # type: ignore[no-untyped-def]
    found = load(bias, i, lanes)
    for k in range(n_weights):
        x_k = _tap(x, x_time, state, t + k, n_weights - 1, row, i, number, lanes)
        found = multiply_add(x_k, load(weight, k * row + i, lanes), found)
    return found


@compile_inline
def _slope(x, share, lanes):  # type: ignore[no-untyped-def]
    """The derivative of SiLU at x, whose sigmoid is `share`."""
    one = exp(zeros(lanes))
    return share * multiply_add(x, one - share, one)


@compile_inline
def _shifted_forth(  # type: ignore[no-untyped-def]
    x, x_time, state, weight, bias, y, t, silu, n_weights, row, start, stop, number, lanes
):
    for i in range(start, stop, width_of(lanes)):
        found = _convolved(x, x_time, state, weight, bias, t, n_weights, row, i, number, lanes)
        store(y, t * row + i, lanes, found * sigmoid(found) if silu != 0 else found)


@compile_inline
def _shifted_back(  # type: ignore[no-untyped-def]
    x, x_time, state, weight, bias, g, d_x, d_state, sums, ring, at, silu, length, n_weights, row, start, stop,
    number, lanes,
):  # fmt: skip
    """`ring` has the gradients of the last K sums."""
    n_before, slot, pitch = n_weights - 1, at % n_weights, row + WIDTH
    for i in range(start, stop, width_of(lanes)):
        if at < length:
            g_t = load(g, at * row + i, lanes)
            if silu != 0:
                found = _convolved(x, x_time, state, weight, bias, at, n_weights, row, i, number, lanes)
                g_t = g_t * _slope(found, sigmoid(found), lanes)
            store(ring, slot * pitch + i, lanes, g_t)
            store(sums, n_weights * pitch + i, lanes, load(sums, n_weights * pitch + i, lanes) + g_t)
            for k in range(n_weights):
                x_k = _tap(x, x_time, state, at + k, n_before, row, i, number, lanes)
                store(sums, k * pitch + i, lanes, multiply_add(g_t, x_k, load(sums, k * pitch + i, lanes)))
        found = zeros(lanes)
        for k in range(max(0, at - length + 1), min(n_before, at) + 1):
            g_k = load(ring, (slot - k if slot >= k else slot - k + n_weights) * pitch + i, lanes)
            found = multiply_add(g_k, load(weight, k * row + i, lanes), found)
        if at < n_before:
            store(d_state, at * row + i, lanes, found)
        else:
            store(d_x, (at - n_before) * row + i, number, found)


@cache
def shifted_kernels(number: str, known: int, width: int) -> KernelPair:
    """Return the kernels of y_t = bias + sum_k weight_k x_{t - K + 1 + k}, or of SiLU(y_t), for x of this type.

    `known` is K, whose loops are unrolled then, or 0 for any K; `width` the floats in a vector, as `width_for`.
    """
    size, one, wide, floats = Lanes(number, 1).n_bytes, Lanes(number, 1), Lanes(number, width), Lanes("float32", width)

    def forward(x, state, weight, bias, y, silu, batch, length, taps, row, span, share):  # type: ignore[no-untyped-def]
        n_weights = taps if known == 0 else known
        (x_start, x_batch, x_time), spans = x, (row + span - 1) // span
        for job in range(share[0], share[1]):
            sequence, start = job // spans, job % spans * span
            stop, inputs = min(row, start + span), x_start + size * sequence * x_batch
            whole = start + (stop - start) // width * width
            before, out = state + 4 * sequence * (n_weights - 1) * row, y + 4 * sequence * length * row
            for t in range(length):
                _shifted_forth(
                    inputs, x_time, before, weight, bias, out, t, silu, n_weights, row, start, whole, wide, floats
                )
                _shifted_forth(
                    inputs, x_time, before, weight, bias, out, t, silu, n_weights, row, whole, stop, one, _ONE
                )

    def backward(  # type: ignore[no-untyped-def]
        x, state, weight, bias, g, d_x, d_state, d_weight, rings, silu, batch, length, taps, row, span, share
    ):
        """`d_weight` has room for each sequence's sums, of the weights and then of the bias, and comes as zeros.

        Its rows and those of `rings` are a vector longer: a power of 2 apart, they would share a set of the cache.
        """
        n_weights = taps if known == 0 else known
        (x_start, x_batch, x_time), spans = x, (row + span - 1) // span
        for job in range(share[0], share[1]):
            sequence, start = job // spans, job % spans * span
            stop, n_before, inputs = min(row, start + span), n_weights - 1, x_start + size * sequence * x_batch
            whole = start + (stop - start) // width * width
            before, to_before = state + 4 * sequence * n_before * row, d_state + 4 * sequence * n_before * row
            given, to_x = g + 4 * sequence * length * row, d_x + size * sequence * length * row
            skipped = 4 * sequence * (n_weights + 1) * (row + WIDTH)
            sums, ring = d_weight + skipped, rings + skipped
            for at in range(length + n_before):
                _shifted_back(
                    inputs, x_time, before, weight, bias, given, to_x, to_before, sums, ring, at, silu, length,
                    n_weights, row, start, whole, wide, floats,
                )  # fmt: skip
                _shifted_back(
                    inputs, x_time, before, weight, bias, given, to_x, to_before, sums, ring, at, silu, length,
                    n_weights, row, whole, stop, one, _ONE,
                )  # fmt: skip

    return KernelPair(Kernel(forward), Kernel(backward))


# A recurrence's output y, with the skip and the gate of its layer, normalised or not, in one walk over rows forward and
# one for all gradients.
#   s = y + skip u;  out = weight r s SiLU(z);  r = 1, or 1 / sqrt(mean(n^2) + epsilon) over each group of the row
#   n = s (the norm before the gate) or s SiLU(z) (after it)
# A job is a span of rows, and has two rows of scratch memory. y, u and z come with strides in numbers, z and out in
# float32 or bfloat16, all else in float32; u and its skip, and weight, may be missing: their addresses are 0 then.
# `numbers` are 1 / channels of a group, and epsilon; after `period` channels the weights start again.

PLAIN, BEFORE, AFTER = 0, 1, 2  # no norm, or its place


@compile_inline
def _skipped(y, u, skip, i, lanes):  # type: ignore[no-untyped-def]
    s = load(y, i, lanes)
    return s if u == 0 else multiply_add(load(u, i, lanes), load(skip, i, lanes), s)


@compile_inline
def _weighted(g, weight, i, lanes):  # type: ignore[no-untyped-def]
    return g if weight == 0 else g * load(weight, i, lanes)


@compile_inline
def _squares(y, u, skip, z, kept, norm, start, stop, number, lanes):  # type: ignore[no-untyped-def]
    """Keep s SiLU(z), and sum what the norm divides."""
    found = zeros(lanes)
    for i in range(start, stop, width_of(lanes)):
        s = _skipped(y, u, skip, i, lanes)
        z_i = load(z, i, number)
        gated = s * (z_i * sigmoid(z_i))
        store(kept, i, lanes, gated)
        n = s if norm == BEFORE else gated
        found = multiply_add(n, n, found)
    return total(found)


@compile_inline
def _write_gated(kept, weight, out, r, start, stop, number, lanes):  # type: ignore[no-untyped-def]
    scale = spread(r, lanes)
    for i in range(start, stop, width_of(lanes)):
        store(out, i, number, _weighted(scale * load(kept, i, lanes), weight, i, lanes))


@compile_inline
def _correlation(y, u, skip, z, weight, g, kept, slopes, start, stop, number, lanes):  # type: ignore[no-untyped-def]
    """Keep SiLU(z) and s SiLU'(z), and sum g weight s SiLU(z)."""
    found = zeros(lanes)
    for i in range(start, stop, width_of(lanes)):
        s = _skipped(y, u, skip, i, lanes)
        z_i = load(z, i, number)
        share = sigmoid(z_i)
        gate = z_i * share
        store(slopes, i, lanes, s * _slope(z_i, share, lanes))
        store(kept, i, lanes, gate)
        found = multiply_add(_weighted(load(g, i, number), weight, i, lanes), s * gate, found)
    return total(found)


@compile_inline
def _gated_back(  # type: ignore[no-untyped-def]
    y, u, skip, z, weight, g, kept, slopes, d_y, d_u, d_z, sums, row, norm, r, less, start, stop, number, lanes
):
    """`less` is r^2 times the mean of what `_correlation` sums, 0 without a norm."""
    r_, less_ = spread(r, lanes), spread(less, lanes)
    for i in range(start, stop, width_of(lanes)):
        s, gate, g_i = _skipped(y, u, skip, i, lanes), load(kept, i, lanes), load(g, i, number)
        of_gated = _weighted(g_i, weight, i, lanes)
        if norm == AFTER:
            of_gated = of_gated - s * gate * less_
        d_s = r_ * (gate * of_gated)
        if norm == BEFORE:
            d_s = d_s - r_ * (s * less_)
        store(d_y, i, lanes, d_s)
        store(d_z, i, number, r_ * load(slopes, i, lanes) * of_gated)
        if weight != 0:
            store(sums, i, lanes, multiply_add(g_i, r_ * (s * gate), load(sums, i, lanes)))
        if u != 0:
            store(d_u, i, lanes, d_s * load(skip, i, lanes))
            store(sums, row + i, lanes, multiply_add(d_s, load(u, i, lanes), load(sums, row + i, lanes)))


@cache
def gated_kernels(number: str) -> KernelPair:
    """Return the kernels for gates of this type."""
    size, wide, one = Lanes(number, 1).n_bytes, Lanes(number, WIDTH), Lanes(number, 1)

    def forward(  # type: ignore[no-untyped-def]
        y, u, skip, z, weight, numbers, out, scales, scratch, batch, length, row, period, group, norm, span, share
    ):
        (y_0, y_batch, y_time), (u_0, u_batch, u_time), (z_0, z_batch, z_time) = y, u, z
        whole, n = group // WIDTH * WIDTH, row // group
        for job in range(share[0], share[1]):
            kept = scratch + 8 * job * group
            for at in range(job * span, min(batch * length, (job + 1) * span)):
                b, t = at // length, at % length
                for j in range(n):
                    c = j * group
                    y_t, skip_t = y_0 + 4 * (b * y_batch + t * y_time + c), skip + 4 * c
                    u_t = u_0 + 4 * (b * u_batch + t * u_time + c) if u_0 != 0 else 0
                    z_t = z_0 + size * (b * z_batch + t * z_time + c)
                    weight_t, out_t = weight + 4 * (c % period) if weight != 0 else 0, out + size * (at * row + c)
                    found = _squares(y_t, u_t, skip_t, z_t, kept, norm, 0, whole, wide, _WIDE)
                    found = found + _squares(y_t, u_t, skip_t, z_t, kept, norm, whole, group, one, _ONE)
                    r = exp(zeros(_ONE))
                    if norm != PLAIN:
                        r = divide(r, sqrt(multiply_add(found, load(numbers, 0, _ONE), load(numbers, 1, _ONE))))
                        store(scales, at * n + j, _ONE, r)
                    _write_gated(kept, weight_t, out_t, r, 0, whole, wide, _WIDE)
                    _write_gated(kept, weight_t, out_t, r, whole, group, one, _ONE)

    def backward(  # type: ignore[no-untyped-def]
        y,
        u,
        skip,
        z,
        weight,
        numbers,
        g,
        scales,
        d_y,
        d_u,
        d_z,
        sums,
        scratch,
        batch,
        length,
        row,
        period,
        group,
        norm,
        span,
        share,
    ):
        """`sums` has room for each job's sums, of the weight and then of the skip, and comes as zeros."""
        (y_0, y_batch, y_time), (u_0, u_batch, u_time), (z_0, z_batch, z_time) = y, u, z
        whole, n = group // WIDTH * WIDTH, row // group
        for job in range(share[0], share[1]):
            kept = scratch + 8 * job * group
            slopes = kept + 4 * group
            for at in range(job * span, min(batch * length, (job + 1) * span)):
                b, t = at // length, at % length
                for j in range(n):
                    c, to = j * group, at * row + j * group
                    y_t, skip_t = y_0 + 4 * (b * y_batch + t * y_time + c), skip + 4 * c
                    u_t = u_0 + 4 * (b * u_batch + t * u_time + c) if u_0 != 0 else 0
                    z_t = z_0 + size * (b * z_batch + t * z_time + c)
                    weight_t, g_t = weight + 4 * (c % period) if weight != 0 else 0, g + size * to
                    r, less = exp(zeros(_ONE)), zeros(_ONE)
                    first = _correlation(y_t, u_t, skip_t, z_t, weight_t, g_t, kept, slopes, 0, whole, wide, _WIDE)
                    rest = _correlation(y_t, u_t, skip_t, z_t, weight_t, g_t, kept, slopes, whole, group, one, _ONE)
                    if norm != PLAIN:
                        r = load(scales, at * n + j, _ONE)
                        less = r * r * ((first + rest) * load(numbers, 0, _ONE))
                    places = d_y + 4 * to, d_u + 4 * to, d_z + size * to, sums + 4 * (2 * job * row + c)
                    _gated_back(
                        y_t, u_t, skip_t, z_t, weight_t, g_t, kept, slopes, *places, row, norm, r, less, 0, whole,
                        wide, _WIDE,
                    )  # fmt: skip
                    _gated_back(
                        y_t, u_t, skip_t, z_t, weight_t, g_t, kept, slopes, *places, row, norm, r, less, whole, group,
                        one, _ONE,
                    )  # fmt: skip

    return KernelPair(Kernel(forward), Kernel(backward))


# B and C of Mamba-3 turned by angles, and their products, in one walk over rows.
# A row is a head at a step. Its first `turning` floats are pairs (real, imaginary), which are multiplied by `unit`;
# the rest stay. Everything is float32 and dense. A job is a span of rows.


@Kernel
def turned_forward(b, c, unit, scale, b_turned, c_turned, dots, rows, size, turning, span, share):  # type: ignore[no-untyped-def]
    """b_turned = scale b unit, c_turned = c unit, dots = b . c."""
    for job in range(share[0], share[1]):
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
    b, c, unit, scale, g_b, g_c, g_dots, d_b, d_c, d_pairs, d_scale, rows, size, turning, span, share
):
    """The imaginary parts of d_pairs are the gradients of the angles."""
    for job in range(share[0], share[1]):
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
