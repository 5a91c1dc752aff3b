"""The gradients of `_chunks_cpu`, whose formulas they are, in one walk back over the chunks."""

from functools import cache
from typing import NamedTuple

from recurra.ops._toolkit.launch import Kernel, compile_inline
from recurra.ops._toolkit.vector_math import divide
from recurra.ops._toolkit.vectors import (
    WIDTH,
    Lanes,
    folded,
    load,
    load_part,
    multiply_add,
    spread,
    store,
    total,
    totals,
    width_of,
    zeros,
)
from recurra.ops._toolkit.words import dot_words, is_below, lanes_from, numbers_in_word
from recurra.ops.gate_loop._chunks_cpu import (
    _FLOAT,
    _decays,
    _fill,
    _gather,
    _identity,
    _long,
    _move,
    _one,
    _paired,
    _plain,
    _product,
    _row,
    _scaled_rows,
    _short,
    _tile,
    _turn,
    words_size,
)

_ALMOST_ZERO = 1e-12  # transitions below are not divided by; above, their products with another are not subnormal
_ROWS = 4


class _Backward(NamedTuple):
    """Addresses in a worker's memory, as `_Forward`; `flow` has dP S, `rows` dP P, each with a row for a step j.

    `of_q` and `of_k` have what flows from the state into each step and from each step to the next state, without
    decays, and `end` what flows from the state to the next. Gradients with respect to later states lie before them.
    """

    q: int
    k: int
    qt: int
    kt: int
    dqt: int
    dkt: int
    v: int
    dy: int
    vt: int
    dyt: int
    dv: int
    scores: int
    flow: int
    weights: int
    rows: int
    d_scores: int
    gates: int
    up: int
    after: int
    of_q: int
    of_k: int
    sums: int
    one: int
    end: int
    h: int
    h_words: int
    q_words: int
    k_words: int
    k_plain: int
    v_words: int
    free: int


def backward_floats(steps: int, p: int, r: int, heads: int) -> int:
    """Count the floats of a worker's memory for this many heads of a group."""
    words = (p * r + 3 * steps * p + 2 * steps * r + max(p * r, steps * max(p, r, steps))) // 2
    return (heads + 1) * p * r + steps * (6 * p + 5 * r + 5 * steps + 5 + WIDTH) + 2 * WIDTH + words


@compile_inline
def _backward_room(start, steps, p, r):  # type: ignore[no-untyped-def]
    wide, high, square, row = _FLOAT * steps * p, _FLOAT * steps * r, _FLOAT * steps * steps, _FLOAT * steps
    v = start + 6 * wide
    scores = v + 5 * high
    gates = scores + 5 * square
    one = gates + (5 + WIDTH) * row
    h = one + 2 * _FLOAT * WIDTH
    h_words = h + _FLOAT * p * r
    words = h_words + _FLOAT * p * r // 2
    v_words = words + 3 * wide // 2
    return _Backward(
        start, start + wide, start + 2 * wide, start + 3 * wide, start + 4 * wide, start + 5 * wide,
        v, v + high, v + 2 * high, v + 3 * high, v + 4 * high,
        scores, scores + square, scores + 2 * square, scores + 3 * square, scores + 4 * square,
        gates, gates + row, gates + 2 * row, gates + 3 * row, gates + 4 * row, gates + 5 * row,
        one, one + _FLOAT * WIDTH, h, h_words, words, words + wide // 2, words + wide, v_words, v_words + high,
    )  # fmt: skip


@compile_inline
def _add(x, out, at, lanes, other, summed, long):  # type: ignore[no-untyped-def]
    store(out, at, long, multiply_add(x, lanes, load(out, at, long)))
    return multiply_add(x, load(other, at, long), summed)


@compile_inline
def _product_by_lanes(a, a_row, b, n, out, n_rows, lanes, other, sums, long, words):  # type: ignore[no-untyped-def]
    """Add (A B) times a vector to `out`, and write the sums down the columns of (A B) * other."""
    vector, summed, pitch = load(lanes, 0, long), zeros(long), width_of(long)
    for i in range(0, n_rows, _ROWS):
        x, y, z, w = _tile(a + _FLOAT * i * a_row, a_row, 1, b, pitch, 0, n, long, words)
        summed = _add(x, out, i * pitch, vector, other, summed, long)
        summed = _add(y, out, (i + 1) * pitch, vector, other, summed, long)
        summed = _add(z, out, (i + 2) * pitch, vector, other, summed, long)
        summed = _add(w, out, (i + 3) * pitch, vector, other, summed, long)
    store(sums, 0, long, summed)


@compile_inline
def _read_keys_back(q, k, s, start, n, group, room, sizes, time, words):  # type: ignore[no-untyped-def]
    """Gather what the heads of a group share, multiply their transposed scores, and begin their sums."""
    steps, p, word = width_of(time), sizes.p, numbers_in_word(words)
    _gather(q, s, start, n, group, sizes.d_qk, room.q, p, steps)
    _gather(k, s, start, n, group, sizes.d_qk, room.k, p, steps)
    _turn(room.q, steps, p, room.qt)
    _turn(room.k, steps, p, room.kt)
    k_plain = _plain(room.k, room.k_plain, steps * p, words)
    qt_paired = _paired(room.qt, room.free, p, steps, words)
    _product(k_plain, p // word, 1, qt_paired, p // word, room.scores, steps, steps, 0, 0, 0, 0, words)
    _fill(room.dqt, 2 * steps * p)
    _fill(room.d_scores, steps * steps)
    q_paired = _paired(room.q, room.q_words, steps, p, words)
    return q_paired, k_plain, _paired(room.k, room.k_words, steps, p, words)


@compile_inline
def _weights_back(room, time):  # type: ignore[no-untyped-def]
    """Multiply what is transposed by decays: P, dS, which is added to the group's, and what flows between steps."""
    decay, steps = zeros(time), width_of(time)
    for j in range(steps - 1, -1, -1):
        if j < steps - 1:
            decay = decay * spread(load(room.gates, j + 1, _one), time)
        decay = decay + _identity(j, time)
        at = j * steps
        d_p, s_j = load(room.flow, at, time), load(room.scores, at, time)
        p_j = s_j * decay
        store(room.weights, at, time, p_j)
        store(room.d_scores, at, time, multiply_add(d_p, decay, load(room.d_scores, at, time)))
        store(room.rows, at, time, d_p * p_j)
        store(room.flow, at, time, d_p * s_j)


@compile_inline
def _head_back(k_plain, h, carry, dv, pitch, n, room, sizes, time, words):  # type: ignore[no-untyped-def]
    """Write a chunk's dv of one head, and add to dQ and dK; v, dy, h and the decays have been read."""
    steps, p, r, word = width_of(time), sizes.p, sizes.r, numbers_in_word(words)
    _turn(room.v, steps, r, room.vt)
    _turn(room.dy, steps, r, room.dyt)
    v_plain = _plain(room.v, room.free, steps * r, words)
    dyt_paired = _paired(room.dyt, room.v_words, r, steps, words)
    _product(v_plain, r // word, 1, dyt_paired, r // word, room.flow, steps, steps, 0, 0, 0, 0, words)
    _weights_back(room, time)
    _product_by_lanes(h, r // word, dyt_paired, r // word, room.dqt, p, room.up, room.qt, room.of_q, time, words)
    c_plain = _plain(carry, room.free, p * r, words)
    vt_paired = _paired(room.vt, room.v_words, r, steps, words)
    _product_by_lanes(
        c_plain, r // word, vt_paired, r // word, room.dkt, p, room.after, room.kt, room.of_k, time, words
    )
    c_paired = _paired(carry, room.free, p, r, words)
    _product(k_plain, p // word, 1, c_paired, p // word, room.dv, steps, r, room.after, 0, 0, 0, words)
    p_plain = _plain(room.weights, room.free, steps * steps, words)
    dy_paired = _paired(room.dy, room.v_words, steps, r, words)
    _product(p_plain, steps // word, 1, dy_paired, steps // word, room.dv, steps, r, 0, room.one, 0, 1, words)
    return _move(room.dv, r, dv, pitch, n, sizes.d_v)


@compile_inline
def _carry_back(q_paired, carry, room, sizes, time, words):  # type: ignore[no-untyped-def]
    steps, word = width_of(time), numbers_in_word(words)
    _scaled_rows(room.dy, room.up, room.dy, steps, sizes.r)
    dy_paired, whole = _paired(room.dy, room.v_words, steps, sizes.r, words), room.up + _FLOAT * (steps - 1)
    _product(q_paired, 1, sizes.p, dy_paired, steps // word, carry, sizes.p, sizes.r, 0, whole, 0, 0, words)


@compile_inline
def _write_keys_back(q_paired, k_paired, dq, dk, s, start, n, group, room, sizes, time, words):  # type: ignore[no-untyped-def]
    """Write dq and dk of a group, to which the sum of its dS comes last."""
    steps, p, word = width_of(time), sizes.p, numbers_in_word(words)
    paired = _paired(room.d_scores, room.free, steps, steps, words)
    _product(k_paired, 1, p, paired, steps // word, room.dqt, p, steps, 0, room.one, 0, 0, words)
    _turn(room.d_scores, steps, steps, room.rows)
    paired = _paired(room.rows, room.free, steps, steps, words)
    _product(q_paired, 1, p, paired, steps // word, room.dkt, p, steps, 0, room.one, 0, 0, words)
    _turn(room.dqt, p, steps, room.q)
    _turn(room.dkt, p, steps, room.k)
    bad = _move(room.q, p, _row(dq, s, start, group), dq[2], n, sizes.d_qk)
    return bad + _move(room.k, p, _row(dk, s, start, group), dk[2], n, sizes.d_qk)


@compile_inline
def _flows(room, t, time):  # type: ignore[no-untyped-def]
    """Sum what flows from steps before t, or the state, to those from t on, or the end, were a_t 1."""
    decay, at_end, summed, steps = zeros(time), zeros(time), zeros(time), width_of(time)
    for j in range(steps - 1, -2, -1):  # -1 is the state
        if j < steps - 1:
            gate = lanes_from(0, _one) if j + 1 == t else load(room.gates, j + 1, _one)
            decay = spread(gate, time) * decay
        if j >= 0:
            decay = decay + _identity(j, time)
        if j < t:
            row = room.of_q if j < 0 else room.flow + _FLOAT * j * steps
            end = room.end if j < 0 else room.of_k + _FLOAT * j
            summed = multiply_add(load(row, 0, time), decay, summed)
            at_end = multiply_add(spread(load(end, 0, _one), time), decay, at_end)
    return total(summed * lanes_from(t, time)) + total(at_end * lanes_from(steps - 1, time))


@compile_inline
def _gate_gradients(room, time):  # type: ignore[no-untyped-def]
    """Write the gradients of a chunk's transitions to `sums`."""
    steps = width_of(time)
    summed = load(room.of_q, 0, time) * load(room.up, 0, time)
    to_end = load(room.end, 0, _one) * load(room.up, steps - 1, _one)
    for t in range(steps):
        if t > 0:
            summed = summed + load(room.rows, (t - 1) * steps, time)
            to_end = multiply_add(load(room.of_k, t - 1, _one), load(room.after, t - 1, _one), to_end)
        store(room.sums, t * WIDTH, _short, folded(summed * lanes_from(t, time)))
        store(room.sums, t * WIDTH, _one, load(room.sums, t * WIDTH, _one) + to_end)
    for t in range(0, steps, WIDTH):
        store(room.sums, t, _short, totals(room.sums + _FLOAT * t * WIDTH, _short))
    for t in range(steps):
        if is_below(load(room.gates, t, _one), _ALMOST_ZERO):
            store(room.sums, t, _one, _flows(room, t, time))
        else:
            store(room.sums, t, _one, divide(load(room.sums, t, _one), load(room.gates, t, _one)))


@compile_inline
def _write_gates_back(h, carry, da, s, start, n, head, room, sizes, time, words):  # type: ignore[no-untyped-def]
    n_words, met = sizes.p * sizes.r // numbers_in_word(words), zeros(_long)
    c_plain = _plain(carry, room.free, sizes.p * sizes.r, words)
    for at in range(0, n_words, width_of(_long)):
        met = dot_words(load(h, at, _long), load(c_plain, at, _long), met, words)
    store(room.end, 0, _one, total(folded(met)))
    _gate_gradients(room, time)
    for t in range(n):
        store(_row(da, s, start + t, head), 0, _one, load(room.sums, t, _one))
    bad = zeros(_short)
    for at in range(0, n, WIDTH):
        bad = multiply_add(load_part(room.sums, at, n - at, _short), zeros(_short), bad)
    return bad


@cache
def backward_kernel(number: str, steps: int) -> Kernel:
    """Return the kernel of all gradients, as `forward_kernel`; it writes da unless its address is 0."""
    words, time = Lanes(number, WIDTH), Lanes("float32", steps)

    def backward(  # type: ignore[no-untyped-def]
        dy, q, k, v, a, kept, dlast, dq, dk, dv, da, dstate, found, scratch, sizes, share
    ):
        heads, of_group, n_chunks = sizes.heads, sizes.heads // sizes.groups, (sizes.length + steps - 1) // steps
        d_qk, d_v, of_state, dense = sizes.d_qk, sizes.d_v, sizes.p * sizes.r, sizes.d_qk * sizes.d_v
        size = words_size(dense == of_state, words)
        for worker in range(share[0], share[1]):
            carries = scratch + _FLOAT * worker * sizes.share
            room = _backward_room(carries + _FLOAT * of_group * of_state, steps, sizes.p, sizes.r)
            _fill(carries, sizes.share)
            store(room.one, 0, _one, lanes_from(0, _one))
            bad = zeros(_short)
            for job in range(worker, sizes.batch * sizes.groups, sizes.workers):
                s, group = job // sizes.groups, job % sizes.groups
                first = s * heads + group * of_group
                for i in range(of_group):
                    _move(
                        dlast + _FLOAT * (first + i) * dense, d_v, carries + _FLOAT * i * of_state, sizes.r, d_qk, d_v
                    )
                for m in range(n_chunks - 1, -1, -1):
                    start, n = m * steps, min(steps, sizes.length - m * steps)
                    q_paired, k_plain, k_paired = _read_keys_back(q, k, s, start, n, group, room, sizes, time, words)
                    for i in range(of_group):
                        head, carry = group * of_group + i, carries + _FLOAT * i * of_state
                        _gather(v, s, start, n, head, d_v, room.v, sizes.r, steps)
                        _gather(dy, s, start, n, head, d_v, room.dy, sizes.r, steps)
                        _decays(a, s, start, n, head, room.gates, room.up, room.after, steps)
                        h = kept + size * ((first + i) * n_chunks + m) * dense
                        if dense != of_state:
                            _move(h, d_v, room.h, sizes.r, d_qk, d_v)
                            h = _plain(room.h, room.h_words, of_state, words)
                        place = _row(dv, s, start, head)
                        bad = bad + _head_back(k_plain, h, carry, place, dv[2], n, room, sizes, time, words)
                        if da[0] != 0:
                            bad = bad + _write_gates_back(h, carry, da, s, start, n, head, room, sizes, time, words)
                        _carry_back(q_paired, carry, room, sizes, time, words)
                    bad = bad + _write_keys_back(
                        q_paired, k_paired, dq, dk, s, start, n, group, room, sizes, time, words
                    )
                for i in range(of_group):
                    _move(
                        carries + _FLOAT * i * of_state, sizes.r, dstate + _FLOAT * (first + i) * dense, d_v, d_qk, d_v
                    )
            store(found, worker, _one, total(bad))

    return Kernel(backward)
