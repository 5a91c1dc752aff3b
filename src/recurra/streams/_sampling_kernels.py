"""The choice of a token for each row of logits, without sorting a vocabulary.

A row is read once for its largest logit; a greedy one takes the first token with this logit. Any other row is divided
by its temperature and filtered:

- top-k: the largest logits of short blocks give a lower bound of the k-th largest one, and only blocks that reach it
  are looked at again;
- top-p: the weights are summed by value in a histogram, and only the values in one of its bins are sorted;
- the token is the first whose running sum of weights exceeds a share of their total, found block by block.

Weights are exponentials in float64, so they and their sums agree with the plain form, `recurra.streams.sampling`, to
about 1e-15: a choice differs only if the drawn share is that close to the border between two tokens. A row's token
depends only on the row: the order of every sum is fixed.
"""

import math

import numpy as np
from numba import prange

from recurra.ops._toolkit.launch import LoopKernel, compile_inline, compile_part

_NOTHING = -1
"""Result for a row that has no token to choose."""
_BLOCK = 1024  # weights that are summed together
_SHORT = 32  # logits of a block whose largest is found
_LANES = 8  # sums that run side by side
_BINS = 2048
_SIDES = 4  # sums of a bin
_CLOSE = 1e-300  # values this close count as equal
_LOG2_E = 1 / math.log(2)
_LN2_HIGH = 0.693147180369123816490  # 32 bits: its product with a whole number is exact
_LN2_LOW = 1.90821492927058770002e-10
_ROUNDING = 6755399441055744.0  # 1.5 * 2^52: the sum with it is a whole number, which its lowest bits hold
_LOWEST = -700.0  # the exponential of less is 0 here
_TERMS = np.array([1 / math.factorial(n) for n in range(14)])


# loops in place of what numpy has for them, each of which would take a quarter of a second to compile


@compile_inline
def _fill(values, number):  # type: ignore[no-untyped-def]
    for i in range(len(values)):
        values[i] = number


@compile_inline
def _most(values):  # type: ignore[no-untyped-def]
    most = values[0]
    for i in range(1, len(values)):
        most = values[i] if values[i] > most else most
    return most


@compile_inline
def _largest(row):  # type: ignore[no-untyped-def]
    """The largest number; NaN if there is one."""
    running, n_nan = np.empty(_SHORT, row.dtype), 0
    _fill(running, -np.inf)
    stop = len(row) - len(row) % _SHORT
    for start in range(0, stop, _SHORT):
        part = row[start : start + _SHORT]
        for lane in range(_SHORT):
            running[lane] = part[lane] if part[lane] > running[lane] else running[lane]
    for i in range(stop, len(row)):
        running[0] = max(running[0], row[i])
    for i in range(len(row)):
        n_nan += row[i] != row[i]
    return _most(running) if n_nan == 0 else row.dtype.type(np.nan)


@compile_inline
def _first_place(row, value):  # type: ignore[no-untyped-def]
    for start in range(0, len(row), _BLOCK):
        n_equal = 0
        part = row[start : start + _BLOCK]
        for i in range(len(part)):
            n_equal += part[i] == value
        if n_equal:
            for i in range(len(part)):
                if part[i] == value:
                    return start + i
    return _NOTHING


# --- the value at which a sum is reached ---


@compile_inline
def _extent(values):  # type: ignore[no-untyped-def]
    """The largest value and the smallest finite one, halved, so that their distance is finite."""
    high, low, half = np.empty(_LANES), np.empty(_LANES), 0.5
    _fill(high, -np.inf)
    _fill(low, np.inf)
    stop = len(values) - len(values) % _LANES
    for start in range(0, stop, _LANES):
        some = values[start : start + _LANES]
        for lane in range(_LANES):
            x = half * some[lane]
            high[lane] = x if x > high[lane] else high[lane]
            low[lane] = x if x < low[lane] and x > -np.inf else low[lane]
    for i in range(stop, len(values)):
        x = half * values[i]
        high[0] = max(high[0], x)
        low[0] = x if x < low[0] and x > -np.inf else low[0]
    for lane in range(_LANES):
        low[0] = low[lane] if low[lane] < low[0] else low[0]
    return _most(high), low[0]


@compile_inline
def _put_in_bins(values, high, scale, bins):  # type: ignore[no-untyped-def]
    for i in range(len(values)):
        below = (high - 0.5 * values[i]) * scale
        bins[i] = np.int32(below if below < _BINS - 1 else _BINS - 1)


@compile_part
def _value_at(values, weights, enough):  # type: ignore[no-untyped-def]
    """The value at which the sum of weights, the largest value first, reaches `enough`; weights of none are 1."""
    some, weighs = values, weights
    bins, held, before = np.empty(len(values), np.int32), np.empty(_BINS * _SIDES), 0.0
    while True:
        high, low = _extent(some)
        if not high - low > _CLOSE:
            return some.dtype.type(2 * low if low < np.inf else -np.inf)
        _put_in_bins(some, high, (_BINS - 1) / (high - low), bins)
        _fill(held, 0.0)
        for i in range(len(some)):  # neighbours add to different numbers, so that none waits for the other
            held[_SIDES * bins[i] + i % _SIDES] += weighs[i] if len(weighs) else 1.0
        chosen, reached = 0, before
        for number in range(_BINS):
            inside = 0.0
            for side in range(_SIDES):
                inside += held[_SIDES * number + side]
            if inside > 0:
                chosen, before = number, reached
                reached += inside
                if reached >= enough:
                    break
        n, kept, kept_weights = 0, np.empty_like(some), np.empty(len(weighs))
        for i in range(len(some)):
            if bins[i] == chosen:
                kept[n] = some[i]
                if len(weighs):
                    kept_weights[n] = weighs[i]
                n += 1
        some, weighs = kept[:n], kept_weights[: n if len(weighs) else 0]


@compile_inline
def _kept(values, smallest, places):  # type: ignore[no-untyped-def]
    """Move the values that are not below `smallest` to the front, and write their places."""
    n = 0
    for start in range(0, len(values), _SHORT):
        part, n_here = values[start : start + _SHORT], 0
        for i in range(len(part)):
            n_here += part[i] >= smallest
        if n_here:
            for i in range(start, start + len(part)):
                if values[i] >= smallest:
                    values[n], places[n] = values[i], i
                    n += 1
    return n


@compile_part
def _keep_largest(values, places, k):  # type: ignore[no-untyped-def]
    """Keep the k largest values, and those that equal the last of them, at the front, in order; give their number."""
    n, none = len(values), np.empty(0)
    tops = np.empty((n + _SHORT - 1) // _SHORT, values.dtype)
    if k > len(tops):
        return _kept(values, _value_at(values, none, k), places)
    n_blocks = 0
    for block in range(len(tops)):
        tops[block] = _most(values[block * _SHORT : (block + 1) * _SHORT])
        n_blocks += tops[block] > -np.inf
    # k blocks reach that, and so do k values at least; if fewer have a token that is not ruled out, all are looked at
    enough = _value_at(tops, none, k) if n_blocks >= k else values.dtype.type(-np.inf)
    n = _kept(values, enough, places)
    smallest, n_held, n = _value_at(values[:n], none, k), n, 0
    for i in range(n_held):
        if values[i] >= smallest:
            values[n], places[n] = values[i], places[i]
            n += 1
    return n


# --- weights ---


@compile_inline
def _weigh(values, top, weights, rounded):  # type: ignore[no-untyped-def]
    """Write exp(value - top) of each value; `rounded` is memory of a block."""
    for start in range(0, len(values), _BLOCK):
        some, out = values[start : start + _BLOCK], weights[start : start + _BLOCK]
        for i in range(len(some)):
            x = np.float64(some[i]) - top
            x = x if x > _LOWEST else _LOWEST
            shifted = x * _LOG2_E + _ROUNDING
            n = shifted - _ROUNDING
            r = (x - n * _LN2_HIGH) - n * _LN2_LOW
            power = _TERMS[13]
            power = power * r + _TERMS[12]
            power = power * r + _TERMS[11]
            power = power * r + _TERMS[10]
            power = power * r + _TERMS[9]
            power = power * r + _TERMS[8]
            power = power * r + _TERMS[7]
            power = power * r + _TERMS[6]
            power = power * r + _TERMS[5]
            power = power * r + _TERMS[4]
            power = power * r + _TERMS[3]
            power = power * r + 0.5
            power = power * r + 1.0
            rounded[i] = shifted
            out[i] = power * r + 1.0
        bits, shifts = out.view(np.int64), rounded.view(np.int64)
        for i in range(len(some)):
            bits[i] += shifts[i] << 52  # times 2^n
        for i in range(len(some)):
            out[i] = out[i] if np.float64(some[i]) - top > _LOWEST else 0.0


@compile_inline
def _sums(weights, sums):  # type: ignore[no-untyped-def]
    """Write the sum of each block; give the sum of all."""
    whole, running = 0.0, np.empty(_LANES)
    for block in range(len(sums)):
        part = weights[block * _BLOCK : (block + 1) * _BLOCK]
        stop = len(part) - len(part) % _LANES
        _fill(running, 0.0)
        for start in range(0, stop, _LANES):
            some = part[start : start + _LANES]
            for lane in range(_LANES):
                running[lane] += some[lane]
        for i in range(stop, len(part)):
            running[0] += part[i]
        sums[block] = 0.0
        for lane in range(_LANES):
            sums[block] += running[lane]
        whole += sums[block]
    return whole


@compile_inline
def _drop_below(values, smallest, weights):  # type: ignore[no-untyped-def]
    for i in range(len(values)):
        weights[i] = weights[i] if values[i] >= smallest else 0.0


@compile_inline
def _place_of(weights, sums, share):  # type: ignore[no-untyped-def]
    """The first place at which the running sum of weights is beyond a share of their total."""
    wanted, before, block = share * _sums(weights, sums), 0.0, 0
    while block < len(sums) - 1 and before + sums[block] <= wanted:
        before += sums[block]
        block += 1
    last = _NOTHING
    for i in range(block * _BLOCK, min((block + 1) * _BLOCK, len(weights))):
        if weights[i] > 0:
            before += weights[i]
            last = i
            if before > wanted:
                break
    return last


# --- rows ---


@compile_part
def _drawn(row, largest, temperature, k, p, below, share):  # type: ignore[no-untyped-def]
    """Draw a token of a row; `below` is how far under the largest a value may lie."""
    n = len(row)
    values, places = np.empty(n, row.dtype), np.empty(n if k < n else 0, np.int64)
    for i in range(n):
        values[i] = row[i] / temperature
    top = largest / temperature
    if not np.isfinite(top):
        return _NOTHING
    if k < n:
        n = _keep_largest(values, places, k)
    values = values[:n]
    weights, sums = np.empty(n), np.empty((n + _BLOCK - 1) // _BLOCK)
    _weigh(values, np.float64(top), weights, np.empty(_BLOCK))
    if p < 1:
        smallest = _value_at(values, weights, p * _sums(weights, sums))
        _drop_below(values, smallest, weights)
    if below > -np.inf:
        _drop_below(values, top + below, weights)
    place = _place_of(weights, sums, share)
    return places[place] if k < len(row) and place >= 0 else place


def _choose(logits, temperatures, ks, ps, belows, shares, tokens):  # type: ignore[no-untyped-def]
    """Write a token for each row of logits (B, V); a temperature of 0 takes the likeliest."""
    for number in prange(len(logits)):
        row = logits[number]
        largest = _largest(row)
        if not np.isfinite(largest):
            tokens[number] = _NOTHING
        elif temperatures[number] == 0:
            tokens[number] = _first_place(row, largest)
        else:
            tokens[number] = _drawn(
                row, largest, temperatures[number], ks[number], ps[number], belows[number], shares[number]
            )


choose_kernel = LoopKernel(_choose)
