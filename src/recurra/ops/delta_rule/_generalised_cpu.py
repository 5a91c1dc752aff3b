"""The generalised delta rule on the CPU in float32, step by step: one kernel forward, one for all gradients.

    forward   u = r h_{t-1};  h = a h_{t-1} + z^T u + k^T v;  y = q h
    backward  G = C + q^T dy, with the carry C from the next step;  dq = dy h^T;  dk = v G^T;  dz = u G^T;  dv = k G;
              du = z G;  da = <G, h_{t-1}> by channel;  dr = du h_{t-1}^T;  C = a G + r^T du

r is what reads and z what writes it. The plan is that of `_cpu.py`: a job is a head of a sequence, and walks through
time with a block of the state's columns in the first-level cache; what the next r reads is summed while a row is in
registers. The forward walk keeps u and every `every`th state. Unlike there, a block lies in scratch memory in both
walks, whole vectors of it: a head has 64 channels as published, and others are filled up with zeros.
"""

from recurra.ops._toolkit.launch import Kernel, compile_inline
from recurra.ops._toolkit.vectors import WIDTH, folded, load, load_part, multiply_add, spread, store, store_part, zeros
from recurra.ops.delta_rule._cpu import (
    _AHEAD,
    _BLOCK,
    _COLUMNS,
    _FLOATS,
    _LONG,
    _ONE,
    _PAIR,
    _add_up,
    _fetch,
    _read,
    _turn,
    rows_of_block,
)
from recurra.ops.gate_loop._heads_cpu import copy_rows, fill


def forward_scratch(d_qk: int) -> int:
    """Return the floats of scratch memory of a worker: a block of the state."""
    return d_qk * _COLUMNS


def backward_scratch(d_qk: int, every: int) -> int:
    """Return the floats of scratch memory of a worker: blocks of the carry and the states of a chunk, and sums."""
    rows = rows_of_block(d_qk)
    return (every + 2) * rows * _pitch(d_qk) + 2 * rows * (WIDTH + 1)


def _pitch(d_qk: int) -> int:
    return -(-d_qk // _BLOCK) * _BLOCK


@compile_inline
def _step(q, k, z, next_r, a, v_t, u_t, h, y, d_qk, rest):  # type: ignore[no-untyped-def]
    """Take one step in a block of columns, of which `rest` count; return what the next r reads."""
    y_t, read = zeros(_PAIR), zeros(_PAIR)
    for i in range(d_qk):
        at = i * _COLUMNS
        now = spread(load(a, i, _ONE), _PAIR) * load(h, at, _PAIR)
        now = multiply_add(spread(load(z, i, _ONE), _PAIR), u_t, now)
        now = multiply_add(spread(load(k, i, _ONE), _PAIR), v_t, now)
        store(h, at, _PAIR, now)
        y_t = multiply_add(spread(load(q, i, _ONE), _PAIR), now, y_t)
        read = multiply_add(spread(load(next_r, i, _ONE), _PAIR), now, read)
    store_part(y, 0, rest, _PAIR, y_t)
    return read


@compile_inline
def _walk(q, k, v, a, r, z, h, y, u, kept, length, heads, d_qk, d_v, every, rest):  # type: ignore[no-untyped-def]
    """Walk through time in a block of columns; addresses are those of the block at the first step."""
    read = _read(r, h, _COLUMNS, d_qk, _COLUMNS, _PAIR)
    for t in range(length):
        if kept != 0 and t % every == 0:
            copy_rows(h, _COLUMNS, kept + 4 * (t // every) * d_qk * d_v, d_v, d_qk, rest, _PAIR)
        keys, values = 4 * t * heads * d_qk, 4 * t * heads * d_v
        following, ahead = 4 * min(length - 1 - t, 1) * heads * d_qk, keys + 4 * _AHEAD * heads * d_qk
        for x in (q, k, a, r, z):
            _fetch(x + ahead, d_qk)
        _fetch(v + values + 4 * _AHEAD * heads * d_v, rest)
        if u != 0:
            store_part(u + values, 0, rest, _PAIR, read)
        v_t = load_part(v + values, 0, rest, _PAIR)
        read = _step(
            q + keys, k + keys, z + keys, r + keys + following, a + keys, v_t, read, h, y + values, d_qk, rest
        )  # fmt: skip


@Kernel
def generalised_delta_rule_forward(  # type: ignore[no-untyped-def]
    q, k, v, a, r, z, state, last, y, u, kept, scratch, size, batch, length, heads, d_qk, d_v, every, workers, share
):
    """Fill y, the last state, and u and the kept states (batch, heads, chunks, d_qk, d_v), if they are not 0."""
    n_kept = (length + every - 1) // every
    for worker in range(share[0], share[1]):
        h = scratch + 4 * worker * size
        for job in range(worker, batch * heads, workers):
            first = job // heads * length * heads + job % heads
            keys = 4 * first * d_qk
            for c in range(0, d_v, _COLUMNS):
                rest, values, entering = min(_COLUMNS, d_v - c), 4 * (first * d_v + c), 4 * (job * d_qk * d_v + c)
                copy_rows(state + entering, d_v, h, _COLUMNS, d_qk, rest, _PAIR)
                _walk(
                    q + keys, k + keys, v + values, a + keys, r + keys, z + keys, h, y + values,
                    u + values if u != 0 else 0, kept + 4 * (job * n_kept * d_qk * d_v + c) if kept != 0 else 0,
                    length, heads, d_qk, d_v, every, rest,
                )  # fmt: skip
                copy_rows(h, _COLUMNS, last + entering, d_v, d_qk, rest, _PAIR)


@compile_inline
def _add_to(out, start, rest, is_first, x):  # type: ignore[no-untyped-def]
    """Write a block of a gradient, or add it to that of earlier columns of the state."""
    store_part(out, start, rest, _LONG, x if is_first else x + load_part(out, start, rest, _LONG))


@compile_inline
def _again(k, v, z, u, dy, a, before, after, dq, rows, pitch, start, rest, is_first):  # type: ignore[no-untyped-def]
    """Take the same step again, in the key channels from `start` on, of which `rest` count; dq needs no more."""
    k_t, z_t = load_part(k, start, rest, _LONG), load_part(z, start, rest, _LONG)
    a_t, dq_t = load_part(a, start, rest, _LONG), zeros(_LONG)
    for j in range(rows):
        at = j * pitch + start
        now = multiply_add(z_t, spread(load(u, j, _ONE), _LONG), a_t * load(before, at, _LONG))
        now = multiply_add(k_t, spread(load(v, j, _ONE), _LONG), now)
        store(after, at, _LONG, now)
        dq_t = multiply_add(spread(load(dy, j, _ONE), _LONG), now, dq_t)
    _add_to(dq, start, rest, is_first, dq_t)


@compile_inline
def _back_to_written(  # type: ignore[no-untyped-def]
    q, k, v, z, u, dy, c, of_v, of_u, dk, dz, rows, pitch, start, rest, is_first
):
    """Go back to what the step has written: G in the place of C, dk, dz, and the sums of dv and du."""
    q_t, k_t, z_t = (
        load_part(q, start, rest, _LONG), load_part(k, start, rest, _LONG), load_part(z, start, rest, _LONG)
    )  # fmt: skip
    dk_t, dz_t = zeros(_LONG), zeros(_LONG)
    for j in range(rows):
        at = j * pitch + start
        g = multiply_add(spread(load(dy, j, _ONE), _LONG), q_t, load(c, at, _LONG))
        store(c, at, _LONG, g)
        store(of_v, j * WIDTH, _FLOATS, folded(k_t * g))
        store(of_u, j * WIDTH, _FLOATS, folded(z_t * g))
        dk_t = multiply_add(spread(load(v, j, _ONE), _LONG), g, dk_t)
        dz_t = multiply_add(spread(load(u, j, _ONE), _LONG), g, dz_t)
    _add_to(dk, start, rest, is_first, dk_t)
    _add_to(dz, start, rest, is_first, dz_t)


@compile_inline
def _back_to_state(r, a, du, before, c, dr, da, rows, pitch, start, rest, is_first):  # type: ignore[no-untyped-def]
    """Go back to the state before: C in the place of G, da and dr."""
    r_t, a_t = load_part(r, start, rest, _LONG), load_part(a, start, rest, _LONG)
    dr_t, da_t = zeros(_LONG), zeros(_LONG)
    for j in range(rows):
        at, du_j = j * pitch + start, spread(load(du, j, _ONE), _LONG)
        g, h = load(c, at, _LONG), load(before, at, _LONG)
        store(c, at, _LONG, multiply_add(du_j, r_t, a_t * g))
        da_t = multiply_add(g, h, da_t)
        dr_t = multiply_add(du_j, h, dr_t)
    _add_to(dr, start, rest, is_first, dr_t)
    _add_to(da, start, rest, is_first, da_t)


@Kernel
def generalised_delta_rule_backward(  # type: ignore[no-untyped-def]
    dy, dlast, q, k, v, a, r, z, u, kept, dq, dk, dv, da, dr, dz, dstate, scratch, size, batch, length, heads, d_qk,
    d_v, every, block, pitch, workers, share,
):  # fmt: skip
    """Fill all gradients; a block of columns has `block` of them, each with its key channels filled up to `pitch`."""
    n_kept, tile = (length + every - 1) // every, 4 * block * pitch
    for worker in range(share[0], share[1]):
        c = scratch + 4 * worker * size
        states = c + tile
        of_v = states + (every + 1) * tile
        of_u = of_v + 4 * block * WIDTH
        dv_t = of_u + 4 * block * WIDTH
        du_t = dv_t + 4 * block
        for job in range(worker, batch * heads, workers):
            sequence, head = job // heads, job % heads
            for first in range(0, d_v, block):
                rows, entering, is_new = min(block, d_v - first), 4 * (job * d_qk * d_v + first), first == 0
                fill(c, 2 * block * pitch, _FLOATS)
                fill(of_v, 2 * block * WIDTH, _FLOATS)
                _turn(dlast + entering, d_v, c, pitch, d_qk, rows)
                for m in range(n_kept - 1, -1, -1):
                    start, stop = m * every, min(length, (m + 1) * every)
                    _turn(kept + 4 * ((job * n_kept + m) * d_qk * d_v + first), d_v, states, pitch, d_qk, rows)
                    for t in range(start, stop):
                        step, before = (sequence * length + t) * heads + head, states + (t - start) * tile
                        x, at, ahead = 4 * step * d_qk, 4 * (step * d_v + first), 4 * _AHEAD * heads * d_qk
                        _fetch(k + x + ahead, d_qk), _fetch(z + x + ahead, d_qk), _fetch(a + x + ahead, d_qk)
                        _fetch(dq + x + ahead, d_qk)
                        for i in range(0, d_qk, _BLOCK):
                            _again(
                                k + x, v + at, z + x, u + at, dy + at, a + x, before, before + tile, dq + x, rows,
                                pitch, i, min(_BLOCK, d_qk - i), is_new,
                            )  # fmt: skip
                    for t in range(stop - 1, start - 1, -1):
                        step, before = (sequence * length + t) * heads + head, states + (t - start) * tile
                        x, at, ahead = 4 * step * d_qk, 4 * (step * d_v + first), 4 * _AHEAD * heads * d_qk
                        _fetch(q + x - ahead, d_qk), _fetch(r + x - ahead, d_qk), _fetch(dk + x - ahead, d_qk)
                        _fetch(dz + x - ahead, d_qk), _fetch(dr + x - ahead, d_qk), _fetch(da + x - ahead, d_qk)
                        for i in range(0, d_qk, _BLOCK):
                            _back_to_written(
                                q + x, k + x, v + at, z + x, u + at, dy + at, c, of_v, of_u, dk + x, dz + x, rows,
                                pitch, i, min(_BLOCK, d_qk - i), is_new,
                            )  # fmt: skip
                            _add_up(of_v, dv_t, rows, i)
                            _add_up(of_u, du_t, rows, i)
                        for j in range(0, rows, WIDTH):
                            store_part(dv + at, j, rows - j, _FLOATS, load(dv_t, j, _FLOATS))
                        for i in range(0, d_qk, _BLOCK):
                            _back_to_state(
                                r + x, a + x, du_t, before, c, dr + x, da + x, rows, pitch, i, min(_BLOCK, d_qk - i),
                                is_new,
                            )  # fmt: skip
                _turn(c, pitch, dstate + entering, d_v, rows, d_qk)
