"""The choice of a token for each row of logits, without sorting a vocabulary.

A row is read once for its largest logit; a greedy one takes the first place that holds it. Any other is divided by its
temperature and goes through its filters:

- top-k: a partition around the k-th largest logit;
- top-p: only weights that are large enough to belong to the likeliest tokens are sorted;
- the token is the first whose running sum of weights is beyond a share of their total, found block by block.

Weights are exponentials in float64, so they and their sums agree with the plain form, `recurra.streams.sampling`, to
about 1e-15: a choice differs from it only where the drawn share falls that close to the border between two tokens. A
row's token depends on nothing but the row: every sum has an order of its own.
"""

import math

import numpy as np
from numba import prange

from recurra.ops._toolkit.launch import Kernel, compile_function, compile_inline

_NOTHING = -1
"""Written for a row that has no token to choose."""
_BLOCK = 1024  # weights that are summed together
_SHORT = 32  # logits of a block whose largest is found
_LANES = 8  # sums that run side by side
_LOG2_E = 1 / math.log(2)
_LN2_HIGH = 0.693147180369123816490  # 32 bits: its product with a whole number is exact
_LN2_LOW = 1.90821492927058770002e-10
_ROUNDING = 6755399441055744.0  # 1.5 * 2^52: the sum with it is a whole number, which its lowest bits hold
_LOWEST = -700.0  # the exponential of less is 0 here
_TERMS = np.array([1 / math.factorial(n) for n in range(14)])


@compile_inline
def _largest(row):  # type: ignore[no-untyped-def]
    """The largest number; NaN if there is one."""
    running, n_nan = np.full(_SHORT, -np.inf, row.dtype), 0
    stop = len(row) - len(row) % _SHORT
    for start in range(0, stop, _SHORT):
        part = row[start : start + _SHORT]
        for lane in range(_SHORT):
            running[lane] = part[lane] if part[lane] > running[lane] else running[lane]
    for i in range(stop, len(row)):
        running[0] = max(running[0], row[i])
    for i in range(len(row)):
        n_nan += row[i] != row[i]
    return running.max() if n_nan == 0 else row.dtype.type(np.nan)


@compile_inline
def _first_place(row, value):  # type: ignore[no-untyped-def]
    for i in range(len(row)):
        if row[i] == value:
            return i
    return _NOTHING


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
        running[:] = 0.0
        for start in range(0, stop, _LANES):
            some = part[start : start + _LANES]
            for lane in range(_LANES):
                running[lane] += some[lane]
        for i in range(stop, len(part)):
            running[0] += part[i]
        sums[block] = running.sum()
        whole += sums[block]
    return whole


@compile_inline
def _keep_from(values, smallest, places):  # type: ignore[no-untyped-def]
    """Move the values that are not below `smallest` to the front, in order; write their places, give their number."""
    n = 0
    for i in range(len(values)):
        if values[i] >= smallest:
            values[n], places[n] = values[i], i
            n += 1
    return n


@compile_inline
def _smallest_kept(weights, whole, p):  # type: ignore[no-untyped-def]
    """The smallest of the largest weights that sum to the share p of the whole."""
    # All that are smaller than this hold less than the share that may go.
    falling = np.sort(weights[weights >= 0.5 * (1 - p) * whole / len(weights)])[::-1]
    held = 0.0
    for weight in falling:
        held += weight
        if held >= p * whole:
            return weight
    return falling[-1]


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


@compile_function
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
        n = _keep_from(values, np.partition(values, n - k)[n - k], places)
    values = values[:n]
    weights, sums = np.empty(n), np.empty((n + _BLOCK - 1) // _BLOCK)
    _weigh(values, np.float64(top), weights, np.empty(_BLOCK))
    if p < 1:
        _drop_below(weights, _smallest_kept(weights, _sums(weights, sums), p), weights)
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


choose_kernel = Kernel(_choose)
