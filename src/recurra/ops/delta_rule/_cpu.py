"""The gated delta rule on the CPU in float32, step by step: one kernel forward, one for all gradients.

    forward   u = v - k a h_{t-1};  h = a h_{t-1} + k^T (b u);  y = q h
    backward  G = C + q^T dy, with the carry C from the next step;  dq = dy h^T;  dw = k G;  dv = b dw;  db = dw u^T;
              P = G - k^T dv;  da = <P, h_{t-1}>;  dk = b u G^T - dv h_{t-1}^T a;  C = a P

The decay a is one number, or a diagonal matrix with one for each key channel; da is then the products' sums by channel.

Steps take 4 operations for each number of the state forward and 10 back, as many as the products of chunks do or fewer,
and nothing but short sums depends on more than one column of the state: a job is a head of a sequence, and walks
through time with a block of columns that stays in the first-level cache.

The forward walk takes 32 columns at a time; what the next key will read, times its decays, is summed while a row is in
registers. It keeps u and the state that enters every `every`th step. The backward walk has columns as rows, so that its
vectors run over key channels: of the sums only dw lies within vectors, and `totals` makes 16 of those together. It
computes the steps between two kept states again, and holds them while it goes back over them. Nothing is divided, so
decays of 0 are exact.

Tensors are addresses of dense memory. With n workers, each takes every nth job and has scratch memory of its own.
"""

from recurra.ops._toolkit.launch import Kernel, compile_inline
from recurra.ops._toolkit.vectors import (
    WIDTH,
    Lanes,
    folded,
    load,
    load_part,
    multiply_add,
    prefetch,
    spread,
    store,
    store_part,
    total,
    totals,
    turn,
    width_of,
    zeros,
)
from recurra.ops.gate_loop._heads_cpu import copy_rows, fill

_AHEAD = 4  # steps: how far ahead of the walk rows are fetched
_COLUMNS, _BLOCK = 2 * WIDTH, 4 * WIDTH  # floats in a row of a block, forward and back
_PAIR, _LONG = Lanes("float32", _COLUMNS), Lanes("float32", _BLOCK)
_FLOATS, _ONE = Lanes("float32", WIDTH), Lanes("float32", 1)


def forward_scratch(d_qk: int) -> int:
    """Return the floats of scratch memory of a worker: a block of the state, and a key times a decay."""
    return d_qk * _COLUMNS + _padded(d_qk)


def rows_of_block(d_qk: int) -> int:
    """Return the columns of the state in a block of the backward pass: two vectors if 16 KiB hold them, else one."""
    return 2 * WIDTH if d_qk <= 128 else WIDTH


def backward_scratch(d_qk: int, every: int) -> int:
    """Return the floats of scratch memory of a worker: blocks of the carry and the states of a chunk, and sums."""
    rows = rows_of_block(d_qk)
    return (every + 2) * rows * _padded(d_qk) + rows * (WIDTH + 2)


def _padded(d_qk: int) -> int:
    return -(-d_qk // WIDTH) * WIDTH


@compile_inline
def _fetch(address, floats):  # type: ignore[no-untyped-def]
    """Prefetch a row: a head's rows lie a whole step apart, which the hardware does not see."""
    for at in range(0, floats, WIDTH):
        prefetch(address, at, _FLOATS)


@compile_inline
def _turn(source, source_pitch, out, out_pitch, n_rows, n_columns):  # type: ignore[no-untyped-def]
    """Copy numbers, rows to columns."""
    for j in range(0, n_columns, WIDTH):
        for i in range(0, n_rows, WIDTH):
            start, goal = source + 4 * (i * source_pitch + j), out + 4 * (j * out_pitch + i)
            turn(start, source_pitch, goal, out_pitch, n_rows - i, n_columns - j, _FLOATS)


@compile_inline
def _decays(a, start, rest, d_a, lanes):  # type: ignore[no-untyped-def]
    """Load the decays of key channels from `start` on, of which `rest` count; d_a is 1 if they are the same."""
    return load_part(a, start, rest, lanes) if d_a > 1 else spread(load(a, 0, _ONE), lanes)


@compile_inline
def _reader(k, a, scratch, d_qk, d_a):  # type: ignore[no-untyped-def]
    """Return the key that reads a state before its decay: itself, if the decay of a head multiplies what it reads."""
    if d_a == 1:
        return k
    for i in range(0, d_qk, WIDTH):
        store(scratch, i, _FLOATS, load_part(a, i, d_qk - i, _FLOATS) * load_part(k, i, d_qk - i, _FLOATS))
    return scratch


@compile_inline
def _read(k, h, pitch, d_qk, rest, lanes):  # type: ignore[no-untyped-def]
    """Return the value that the key has in a block of columns, of which `rest` count."""
    read = zeros(lanes)
    for i in range(d_qk):
        read = multiply_add(spread(load(k, i, _ONE), lanes), load_part(h, i * pitch, rest, lanes), read)
    return read


@compile_inline
def _step(q, k, next_k, a, w, before, pitch, after, out_pitch, y, d_qk, d_a, rest, lanes):  # type: ignore[no-untyped-def]
    """Take one step in a block of columns; return the value that the next key has then, of which a is a part."""
    y_t, read, a_i = zeros(lanes), zeros(lanes), spread(load(a, 0, _ONE), lanes)
    for i in range(d_qk):
        if d_a > 1:
            a_i = spread(load(a, i, _ONE), lanes)
        entering = a_i * load_part(before, i * pitch, rest, lanes)
        now = multiply_add(spread(load(k, i, _ONE), lanes), w, entering)
        store_part(after, i * out_pitch, rest, lanes, now)
        y_t = multiply_add(spread(load(q, i, _ONE), lanes), now, y_t)
        read = multiply_add(spread(load(next_k, i, _ONE), lanes), now, read)
    store_part(y, 0, rest, lanes, y_t)
    return read


@compile_inline
def _walk(  # type: ignore[no-untyped-def]
    q, k, v, a, b, state, last, y, u, kept, h, ak, length, heads, d_qk, d_v, d_a, every, rest, lanes
):
    """Walk through time in a block of columns; addresses are those of the block at the first step."""
    read, before, pitch = _read(_reader(k, a, ak, d_qk, d_a), state, d_v, d_qk, rest, lanes), state, d_v
    for t in range(length):
        if kept != 0 and t % every == 0:
            copy_rows(before, pitch, kept + 4 * (t // every) * d_qk * d_v, d_v, d_qk, rest, lanes)
        step = t * heads
        k_t, a_t, of_values = k + 4 * step * d_qk, a + 4 * step * d_a, 4 * step * d_v
        following = 4 * min(length - 1 - t, 1) * heads
        reader = _reader(k_t + following * d_qk, a_t + following * d_a, ak, d_qk, d_a)
        _fetch(k_t + 4 * _AHEAD * heads * d_qk, d_qk)
        _fetch(q + 4 * (step + _AHEAD * heads) * d_qk, d_qk)
        _fetch(a_t + 4 * _AHEAD * heads * d_a, d_a)
        _fetch(v + of_values + 4 * _AHEAD * heads * d_v, rest)
        read = read if d_a > 1 else spread(load(a_t, 0, _ONE), lanes) * read
        missing, b_t = load_part(v + of_values, 0, rest, lanes) - read, spread(load(b, step, _ONE), lanes)
        if u != 0:
            store_part(u + of_values, 0, rest, lanes, missing)
        after, out_pitch = (last, d_v) if t + 1 == length else (h, width_of(lanes))
        read = _step(
            q + 4 * step * d_qk, k_t, reader, a_t, b_t * missing, before, pitch, after, out_pitch, y + of_values,
            d_qk, d_a, rest, lanes,
        )  # fmt: skip
        before, pitch = after, out_pitch


@compile_inline
def _walk_block(  # type: ignore[no-untyped-def]
    q, k, v, a, b, state, last, y, u, kept, h, first, job, n_kept, c, length, heads, d_qk, d_v, d_a, every, rest, lanes
):
    """Walk through time from column `c` of a job on, whose first row is `first`."""
    values, entering = 4 * (first * d_v + c), 4 * (job * d_qk * d_v + c)
    u_0 = u + values if u != 0 else 0
    kept_0 = kept + 4 * (job * n_kept * d_qk * d_v + c) if kept != 0 else 0
    _walk(
        q, k, v + values, a, b, state + entering, last + entering, y + values, u_0, kept_0, h,
        h + 4 * d_qk * _COLUMNS, length, heads, d_qk, d_v, d_a, every, rest, lanes,
    )  # fmt: skip


@Kernel
def delta_rule_forward(  # type: ignore[no-untyped-def]
    q, k, v, a, b, state, last, y, u, kept, scratch, size, batch, length, heads, d_qk, d_v, d_a, every, workers, share
):
    """Fill y, the last state, and u and the kept states (batch, heads, chunks, d_qk, d_v), if they are not 0."""
    blocks, n_kept = d_v // _COLUMNS * _COLUMNS, (length + every - 1) // every
    for worker in range(share[0], share[1]):
        h = scratch + 4 * worker * size
        for job in range(worker, batch * heads, workers):
            first = job // heads * length * heads + job % heads
            q_0, k_0, a_0, b_0 = q + 4 * first * d_qk, k + 4 * first * d_qk, a + 4 * first * d_a, b + 4 * first
            for c in range(0, blocks, _COLUMNS):
                _walk_block(
                    q_0, k_0, v, a_0, b_0, state, last, y, u, kept, h, first, job, n_kept, c, length, heads, d_qk, d_v,
                    d_a, every, _COLUMNS, _PAIR,
                )  # fmt: skip
            for c in range(blocks, d_v, WIDTH):
                _walk_block(
                    q_0, k_0, v, a_0, b_0, state, last, y, u, kept, h, first, job, n_kept, c, length, heads, d_qk, d_v,
                    d_a, every, min(WIDTH, d_v - c), _FLOATS,
                )  # fmt: skip


@compile_inline
def _weighted(u, b, w, rows):  # type: ignore[no-untyped-def]
    """Write what a step writes, b u."""
    for j in range(0, rows, WIDTH):
        store(w, j, _FLOATS, spread(load(b, 0, _ONE), _FLOATS) * load_part(u, j, rows - j, _FLOATS))


@compile_inline
def _again(k, w, dy, a, d_a, before, after, dq, rows, pitch, start, rest, is_first, lanes):  # type: ignore[no-untyped-def]
    """Take the same step again, in the key channels from `start` on, of which `rest` count; dq needs no more."""
    k_t, a_t, dq_t = load_part(k, start, rest, lanes), _decays(a, start, rest, d_a, lanes), zeros(lanes)
    for j in range(rows):
        at = j * pitch + start
        now = multiply_add(k_t, spread(load(w, j, _ONE), lanes), a_t * load(before, at, lanes))
        store(after, at, lanes, now)
        dq_t = multiply_add(spread(load(dy, j, _ONE), lanes), now, dq_t)
    store_part(dq, start, rest, lanes, dq_t if is_first else dq_t + load_part(dq, start, rest, lanes))


@compile_inline
def _back_to_w(q, k, dy, w, c, sums, dk, rows, pitch, start, rest, is_first, lanes):  # type: ignore[no-untyped-def]
    """Go back to what the step has written: G in the place of C, dk's first part, and dw's sums."""
    q_t, k_t, dk_t = load_part(q, start, rest, lanes), load_part(k, start, rest, lanes), zeros(lanes)
    for j in range(rows):
        at = j * pitch + start
        g = multiply_add(spread(load(dy, j, _ONE), lanes), q_t, load(c, at, lanes))
        store(c, at, lanes, g)
        store(sums, j * WIDTH, _FLOATS, folded(k_t * g))
        dk_t = multiply_add(spread(load(w, j, _ONE), lanes), g, dk_t)
    store_part(dk, start, rest, lanes, dk_t if is_first else dk_t + load_part(dk, start, rest, lanes))


@compile_inline
def _add_up(sums, dw, rows, start):  # type: ignore[no-untyped-def]
    """Write the sums of all rows to dw, or add them to those of earlier channels."""
    for j in range(0, rows, WIDTH):
        row = totals(sums + 4 * WIDTH * j, _FLOATS)
        store(dw, j, _FLOATS, row if start == 0 else row + load(dw, j, _FLOATS))


@compile_inline
def _values_back(dw, u, b, dv, db, rows, is_first):  # type: ignore[no-untyped-def]
    """Write dv = b dw and db = dw u^T, and put dv in the place of dw."""
    of_b = zeros(_FLOATS)
    for j in range(0, rows, WIDTH):
        dw_t = load(dw, j, _FLOATS)
        of_b = multiply_add(dw_t, load_part(u, j, rows - j, _FLOATS), of_b)
        dw_t = spread(load(b, 0, _ONE), _FLOATS) * dw_t
        store(dw, j, _FLOATS, dw_t)
        store_part(dv, j, rows - j, _FLOATS, dw_t)
    of_b_t = total(of_b)
    store(db, 0, _ONE, of_b_t if is_first else of_b_t + load(db, 0, _ONE))


@compile_inline
def _back_to_state(  # type: ignore[no-untyped-def]
    k, a, d_a, dv, before, c, dk, da, rows, pitch, start, rest, is_first, lanes
):
    """Go back to the state before: C in the place of G, da, and dk's second part."""
    k_t, a_t = load_part(k, start, rest, lanes), _decays(a, start, rest, d_a, lanes)
    da_t, dk_t = zeros(lanes), zeros(lanes)
    for j in range(rows):
        at, dv_j = j * pitch + start, spread(load(dv, j, _ONE), lanes)
        p, h = load(c, at, lanes) - dv_j * k_t, load(before, at, lanes)
        store(c, at, lanes, a_t * p)
        da_t = multiply_add(p, h, da_t)
        dk_t = multiply_add(dv_j, h, dk_t)
    store_part(dk, start, rest, lanes, load_part(dk, start, rest, lanes) - a_t * dk_t)
    if d_a > 1:
        store_part(da, start, rest, lanes, da_t if is_first else da_t + load_part(da, start, rest, lanes))
    else:
        of_a = total(folded(da_t))
        store(da, 0, _ONE, of_a if is_first and start == 0 else of_a + load(da, 0, _ONE))


@Kernel
def delta_rule_backward(  # type: ignore[no-untyped-def]
    dy, dlast, q, k, a, b, u, kept, dq, dk, dv, da, db, dstate, scratch, size, batch, length, heads, d_qk, d_v,
    d_a, every, block, workers, share,
):  # fmt: skip
    """Fill all gradients; a block of columns has `block` of them."""
    pitch, n_kept = (d_qk + WIDTH - 1) // WIDTH * WIDTH, (length + every - 1) // every
    blocks, tile = d_qk // _BLOCK * _BLOCK, 4 * block * pitch
    for worker in range(share[0], share[1]):
        c = scratch + 4 * worker * size
        states = c + tile
        sums = states + (every + 1) * tile
        w = sums + 4 * block * WIDTH
        dw = w + 4 * block
        for job in range(worker, batch * heads, workers):
            sequence, head = job // heads, job % heads
            for first in range(0, d_v, block):
                rows, entering, is_new = min(block, d_v - first), 4 * (job * d_qk * d_v + first), first == 0
                fill(c, 2 * block * pitch, _FLOATS)
                fill(sums, block * WIDTH, _FLOATS)
                _turn(dlast + entering, d_v, c, pitch, d_qk, rows)
                for m in range(n_kept - 1, -1, -1):
                    start, stop = m * every, min(length, (m + 1) * every)
                    _turn(kept + 4 * ((job * n_kept + m) * d_qk * d_v + first), d_v, states, pitch, d_qk, rows)
                    for t in range(start, stop):
                        step, before = (sequence * length + t) * heads + head, states + (t - start) * tile
                        values, k_t, dq_t = 4 * (step * d_v + first), k + 4 * step * d_qk, dq + 4 * step * d_qk
                        after, dy_t, a_t = before + tile, dy + values, a + 4 * step * d_a
                        _fetch(k_t + 4 * _AHEAD * heads * d_qk, d_qk)
                        _fetch(dq_t + 4 * _AHEAD * heads * d_qk, d_qk)
                        _fetch(a_t + 4 * _AHEAD * heads * d_a, d_a)
                        _fetch(dy_t + 4 * _AHEAD * heads * d_v, rows)
                        _fetch(u + values + 4 * _AHEAD * heads * d_v, rows)
                        _weighted(u + values, b + 4 * step, w, rows)
                        for i in range(0, blocks, _BLOCK):
                            _again(k_t, w, dy_t, a_t, d_a, before, after, dq_t, rows, pitch, i, _BLOCK, is_new, _LONG)
                        for i in range(blocks, d_qk, WIDTH):
                            _again(
                                k_t, w, dy_t, a_t, d_a, before, after, dq_t, rows, pitch, i, d_qk - i, is_new, _FLOATS
                            )
                    for t in range(stop - 1, start - 1, -1):
                        step, before = (sequence * length + t) * heads + head, states + (t - start) * tile
                        keys, values = 4 * step * d_qk, 4 * (step * d_v + first)
                        q_t, k_t, dk_t, dy_t = q + keys, k + keys, dk + keys, dy + values
                        u_t, a_t, b_t, da_t = u + values, a + 4 * step * d_a, b + 4 * step, da + 4 * step * d_a
                        _fetch(q_t - 4 * _AHEAD * heads * d_qk, d_qk)
                        _fetch(dk_t - 4 * _AHEAD * heads * d_qk, d_qk)
                        _fetch(da_t - 4 * _AHEAD * heads * d_a, d_a)
                        _fetch(dv + values - 4 * _AHEAD * heads * d_v, rows)
                        _weighted(u_t, b_t, w, rows)
                        for i in range(0, blocks, _BLOCK):
                            _back_to_w(q_t, k_t, dy_t, w, c, sums, dk_t, rows, pitch, i, _BLOCK, is_new, _LONG)
                            _add_up(sums, dw, rows, i)
                        for i in range(blocks, d_qk, WIDTH):
                            _back_to_w(q_t, k_t, dy_t, w, c, sums, dk_t, rows, pitch, i, d_qk - i, is_new, _FLOATS)
                            _add_up(sums, dw, rows, i)
                        _values_back(dw, u_t, b_t, dv + values, db + 4 * step, rows, is_new)
                        for i in range(0, blocks, _BLOCK):
                            _back_to_state(
                                k_t, a_t, d_a, dw, before, c, dk_t, da_t, rows, pitch, i, _BLOCK, is_new, _LONG
                            )
                        for i in range(blocks, d_qk, WIDTH):
                            _back_to_state(
                                k_t, a_t, d_a, dw, before, c, dk_t, da_t, rows, pitch, i, d_qk - i, is_new, _FLOATS
                            )
                _turn(c, pitch, dstate + entering, d_v, rows, d_qk)
