"""The choice of a token for each row of logits, without sorting a vocabulary.

A row is read once for its largest logit; a greedy one takes the first token with this logit. Any other row is divided
by its temperature and filtered:

- top-k: the largest logits of short blocks give a lower bound of the k-th largest one, and only blocks that reach it
  are looked at again;
- top-p: quickselect finds the value at which the sum of the largest weights reaches p of their total;
- the token is the first at which the running sum of weights exceeds a share of their total.

Weights are exponentials in float64, so they and their sums agree with the plain form, `recurra.streams.sampling`, to
about 1e-14: a choice differs only if the drawn share is that close to the border between two tokens. A row's token
depends only on the row: the order of every sum is fixed.
"""

import math

import numpy as np
from numba import prange

from recurra.ops._toolkit.launch import LoopKernel, compile_inline, compile_part

_NOTHING = -1
"""Result for a row that has no token to choose."""
_SHORT = 32  # logits of a block whose largest is found


# loops in place of what numpy has for them, each of which would take a quarter of a second to compile


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
    for lane in range(_SHORT):
        running[lane] = -np.inf
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
    place = 0
    while row[place] != value:
        place += 1
    return place


# --- the value at which a sum is reached ---


@compile_part
def _value_at(values, weights, enough):  # type: ignore[no-untyped-def]
    """The value at which the sum of weights, from the largest value down, reaches `enough`; empty weights count as 1.

    Quickselect: the values on the other side of a pivot are dropped, until the sum is reached at the pivot itself.
    Pivots are pseudo-random: in a row that rises and falls, a pivot from the middle would always be the largest value.
    """
    some, weighs, weighted = values.copy(), weights.copy(), len(weights) > 0
    n, before, number = len(values), 0.0, np.uint64(0)
    while True:
        number = number * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        pivot, above, equal = some[(number >> np.uint64(33)) % np.uint64(n)], 0.0, 0.0
        for i in range(n):
            weight = weighs[i] if weighted else 1.0
            above += weight if some[i] > pivot else 0.0
            equal += weight if some[i] == pivot else 0.0
        is_above, n_kept = before + above >= enough, 0
        if not is_above:
            before += above + equal
        for i in range(n):  # branch-free: a branch would often be mispredicted
            some[n_kept] = value = some[i]
            if weighted:
                weighs[n_kept] = weighs[i]
            n_kept += value > pivot if is_above else value < pivot
        if n_kept == 0 or (not is_above and before >= enough):
            return pivot
        n = n_kept


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
def _weigh(values, top, weights):  # type: ignore[no-untyped-def]
    """Write exp(value - top) of each value; return the sum."""
    total = 0.0
    for i in range(len(values)):
        weights[i] = math.exp(np.float64(values[i]) - top)
        total += weights[i]
    return total


@compile_inline
def _drop_below(values, smallest, weights):  # type: ignore[no-untyped-def]
    """Set the weights of smaller values to 0; return the sum of the others."""
    total = 0.0
    for i in range(len(values)):
        weights[i] = weights[i] if values[i] >= smallest else 0.0
        total += weights[i]
    return total


@compile_inline
def _place_of(weights, wanted):  # type: ignore[no-untyped-def]
    """The first place at which the running sum of weights exceeds `wanted`."""
    before, last = 0.0, _NOTHING
    for i in range(len(weights)):
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
    weights = np.empty(n)
    total = _weigh(values, np.float64(top), weights)
    if p < 1:
        total = _drop_below(values, _value_at(values, weights, p * total), weights)
    if below > -np.inf:
        total = _drop_below(values, top + below, weights)
    place = _place_of(weights, share * total)
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
