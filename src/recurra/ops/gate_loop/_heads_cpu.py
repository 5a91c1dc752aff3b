"""GateLoop with heads on the CPU: h_t = a_t h_{t-1} + k_t^T v_t, y_t = q_t h_t, and all gradients.

    forward   row i of the state:  h_i = a_i h_i + k_i v;  y = sum_i q_i h_i
    backward  row j of what transposes it, with the carry c:  g_j = c_j + dy_j conj(q);  dq = sum_j dy_j conj(h_j);
              dk = sum_j conj(v_j) g_j;  dv_j = <conj(k), g_j>;  da = sum_j g_j conj(h_{j, t-1});  c_j = conj(a) g_j

A step takes 4 to 5 operations for each number of the state forward, fewer than the matrix products of chunks do, and
the state stays in the first-level cache: a job is a head of a sequence, and walks through time with a block of columns
(forward) or of key channels (backward). The long side of a vector runs over what is not summed, so the one sum within a
vector is dv's; `totals` makes 16 of those together.

The forward walk takes two steps at a time, and keeps the state that enters every `every`th step, an even number. The
backward walk computes the steps between two such states again, and holds them while it goes back over them. Without da
no state has to meet a carry: then one walk forward makes dq, and one back dk and dv. Nothing is divided, so transitions
of 0 are exact.

q, k, v, a, y and their gradients are (address, batch stride, time stride, head stride), with neighbouring channels;
states are addresses of dense memory. Strides count floats, complex numbers are interleaved, and a number has n floats.
With n workers, each takes every nth job and has scratch memory of its own.
"""

from functools import cache

from recurra.ops._toolkit.launch import Kernel, compile_inline
from recurra.ops._toolkit.vectors import (
    WIDTH,
    Lanes,
    conjugate,
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
    width_of,
    zeros,
)

_AHEAD = 8  # steps: how far ahead of the walk rows are prefetched


@compile_inline
def _row(tensor, sequence, time, head, size):  # type: ignore[no-untyped-def]
    """Return the address of the channels of one head at one step."""
    start, batch_stride, time_stride, head_stride = tensor
    return start + size * (sequence * batch_stride + time * time_stride + head * head_stride)


@compile_inline
def _fetch(tensor, sequence, time, head, floats, size, lanes):  # type: ignore[no-untyped-def]
    """Prefetch a row: a head's rows lie a whole step apart, which the hardware does not see."""
    address = _row(tensor, sequence, time, head, size)
    for at in range(0, floats, width_of(lanes)):
        prefetch(address, at, lanes)
    prefetch(address, floats - 1, lanes)


@compile_inline
def fill(address, count, long):  # type: ignore[no-untyped-def]
    """Write zeros over `count` floats, a multiple of the vector's width."""
    for at in range(0, count, width_of(long)):
        store(address, at, long, zeros(long))


@compile_inline
def copy_rows(source, source_pitch, out, out_pitch, n_rows, rest, long):  # type: ignore[no-untyped-def]
    """Copy `rest` floats of each row; a pitch is the number of floats from one row to the next."""
    for i in range(n_rows):
        store_part(out, i * out_pitch, rest, long, load_part(source, i * source_pitch, rest, long))


@compile_inline
def _turn(source, source_pitch, out, out_pitch, n_rows, n_columns, n, one):  # type: ignore[no-untyped-def]
    """Copy numbers, rows to columns."""
    for i in range(n_rows):
        for j in range(n_columns):
            store(out, j * out_pitch + i * n, one, load(source, i * source_pitch + j * n, one))


@compile_inline
def _step(q, k, v, a, h, y, d_qk, rest, n, per_channel, long, one):  # type: ignore[no-untyped-def]
    """Take one step in a block of columns, of which `rest` floats count."""
    v_t, y_t, a_i = load_part(v, 0, rest, long), zeros(long), spread(load(a, 0, one), long)
    for i in range(d_qk):
        if per_channel:
            a_i = spread(load(a, i * n, one), long)
        at = i * width_of(long)
        h_i = multiply_add(a_i, load(h, at, long), spread(load(k, i * n, one), long) * v_t)
        store(h, at, long, h_i)
        y_t = multiply_add(spread(load(q, i * n, one), long), h_i, y_t)
    store_part(y, 0, rest, long, y_t)


@compile_inline
def _two_steps(q, k, v, a, q_2, k_2, v_2, a_2, h, y, y_2, d_qk, rest, n, per_channel, long, one):  # type: ignore[no-untyped-def]
    """Take two steps as `_step` does, while a row of the state is in registers."""
    v_t, y_t, a_i = load_part(v, 0, rest, long), zeros(long), spread(load(a, 0, one), long)
    v_u, y_u, a_j = load_part(v_2, 0, rest, long), zeros(long), spread(load(a_2, 0, one), long)
    for i in range(d_qk):
        if per_channel:
            a_i, a_j = spread(load(a, i * n, one), long), spread(load(a_2, i * n, one), long)
        at = i * width_of(long)
        h_i = multiply_add(a_i, load(h, at, long), spread(load(k, i * n, one), long) * v_t)
        y_t = multiply_add(spread(load(q, i * n, one), long), h_i, y_t)
        h_i = multiply_add(a_j, h_i, spread(load(k_2, i * n, one), long) * v_u)
        y_u = multiply_add(spread(load(q_2, i * n, one), long), h_i, y_u)
        store(h, at, long, h_i)
    store_part(y, 0, rest, long, y_t)
    store_part(y_2, 0, rest, long, y_u)


@compile_inline
def _gates(a, rest, per_channel, long, one):  # type: ignore[no-untyped-def]
    """Load the transitions of a block of key channels."""
    return load_part(a, 0, rest, long) if per_channel else spread(load(a, 0, one), long)


@compile_inline
def _step_back(  # type: ignore[no-untyped-def]
    dy, q, k, v, a, h, c, sums, dk, da, d_v, rest, n, per_channel, is_first, with_gates, long, short, one
):
    """Take one step back in a block of key channels, with the transposed state before it and a transposed carry.

    The state is read only for da, which is not written unless `with_gates`.
    """
    q_t, k_t = conjugate(load_part(q, 0, rest, long)), conjugate(load_part(k, 0, rest, long))
    a_t = conjugate(_gates(a, rest, per_channel, long, one))
    dk_t, da_t = zeros(long), zeros(long)
    for j in range(d_v):
        at = j * width_of(long)
        dy_j, v_j = spread(load(dy, j * n, one), long), spread(load(v, j * n, one), long)
        g = multiply_add(dy_j, q_t, load(c, at, long))
        dk_t = multiply_add(conjugate(v_j), g, dk_t)
        if with_gates:
            da_t = multiply_add(conjugate(load(h, at, long)), g, da_t)
        store(c, at, long, a_t * g)
        store(sums, j * width_of(short), short, folded(k_t * g))
    store_part(dk, 0, rest, long, dk_t)
    if not with_gates:
        return
    if per_channel:
        store_part(da, 0, rest, long, da_t)
    elif is_first:
        store(da, 0, one, total(folded(da_t)))
    else:
        store(da, 0, one, load(da, 0, one) + total(folded(da_t)))


@compile_inline
def _step_for_q(dy, k, v, a, h, after, dq, d_v, rest, n, per_channel, long, one):  # type: ignore[no-untyped-def]
    """Take a step again in a block of key channels, between transposed states, for dq."""
    k_t, a_t, dq_t = load_part(k, 0, rest, long), _gates(a, rest, per_channel, long, one), zeros(long)
    for j in range(d_v):
        at = j * width_of(long)
        kv = spread(load(v, j * n, one), long) * k_t
        h_j = multiply_add(a_t, load(h, at, long), kv)
        dq_t = multiply_add(spread(load(dy, j * n, one), long), conjugate(h_j), dq_t)
        store(after, at, long, h_j)
    store_part(dq, 0, rest, long, dq_t)


@compile_inline
def _add_up(sums, dv, d_v, n, is_first, size, short):  # type: ignore[no-untyped-def]
    """Write the sums of all rows to dv, or add them to what other blocks have written."""
    for j in range(0, d_v, width_of(short) // n):
        row, rest = totals(sums + size * width_of(short) * j, short), (d_v - j) * n
        store_part(dv, j * n, rest, short, row if is_first else row + load_part(dv, j * n, rest, short))


@cache
def forward_kernel(number: str, is_complex: bool, vectors: int) -> Kernel:
    """Return the kernel for blocks of this many vectors of columns; it compiles when first called."""
    long, short = Lanes(number, vectors * WIDTH, is_complex), Lanes(number, WIDTH, is_complex)
    one = Lanes(number, 2 if is_complex else 1, is_complex)
    size, n, width = long.n_bytes, one.width, long.width

    def forward(  # type: ignore[no-untyped-def]
        q, k, v, a, state, y, last, kept, scratch, batch, length, heads, d_qk, d_v, per_channel, every, workers, share
    ):
        columns, n_kept = d_v * n, (length + every - 1) // every
        for worker in range(share[0], share[1]):
            h = scratch + size * worker * d_qk * width
            for job in range(worker, batch * heads, workers):
                sequence, head = job // heads, job % heads
                for block in range(0, columns, width):
                    rest, entering = columns - block, size * (job * d_qk * columns + block)
                    fill(h, d_qk * width, long)
                    copy_rows(state + entering, columns, h, width, d_qk, rest, long)
                    for t in range(0, length, 2):
                        if kept != 0 and t % every == 0:
                            to = kept + size * ((job * n_kept + t // every) * d_qk * columns + block)
                            copy_rows(h, width, to, columns, d_qk, rest, long)
                        for ahead in range(t + _AHEAD, t + _AHEAD + 2):
                            _fetch(q, sequence, ahead, head, d_qk * n, size, short)
                            _fetch(k, sequence, ahead, head, d_qk * n, size, short)
                            _fetch(v, sequence, ahead, head, columns, size, short)
                            _fetch(a, sequence, ahead, head, n, size, short)
                            _fetch(y, sequence, ahead, head, columns, size, short)
                        q_t, k_t = _row(q, sequence, t, head, size), _row(k, sequence, t, head, size)
                        a_t, y_t = _row(a, sequence, t, head, size), _row(y, sequence, t, head, size) + size * block
                        v_t = _row(v, sequence, t, head, size) + size * block
                        if t + 1 == length:
                            _step(q_t, k_t, v_t, a_t, h, y_t, d_qk, rest, n, per_channel, long, one)
                        else:
                            _two_steps(
                                q_t, k_t, v_t, a_t, q_t + size * q[2], k_t + size * k[2], v_t + size * v[2],
                                a_t + size * a[2], h, y_t, y_t + size * y[2], d_qk, rest, n, per_channel, long, one,
                            )  # fmt: skip
                    copy_rows(h, width, last + entering, columns, d_qk, rest, long)

    return Kernel(forward)


@cache
def backward_kernel(number: str, is_complex: bool, vectors: int, with_gates: bool) -> Kernel:
    """Return the kernel for blocks of this many vectors of key channels; it compiles when first called.

    Unless `with_gates`, there is no da, all steps are one chunk, and of the kept states it reads the first.
    """
    long, short = Lanes(number, vectors * WIDTH, is_complex), Lanes(number, WIDTH, is_complex)
    one = Lanes(number, 2 if is_complex else 1, is_complex)
    size, n, width = long.n_bytes, one.width, long.width

    def backward(  # type: ignore[no-untyped-def]
        dy, q, k, v, a, kept, dlast, dq, dk, dv, da, dstate, scratch, batch, length, heads, d_qk, d_v, per_channel,
        every, workers, share,
    ):  # fmt: skip
        columns, channels, n_kept = d_v * n, d_qk * n, (length + every - 1) // every
        state, sums = size * d_v * width, size * (d_v + WIDTH) * WIDTH
        chunks, steps = (n_kept, every) if with_gates else (1, length)
        tiles, next_tile = (every + 2, state) if with_gates else (1, 0)  # without gates, states and carry in turn
        for worker in range(share[0], share[1]):
            c = scratch + worker * (tiles * state + sums)
            states, to_sum = c + next_tile, c + tiles * state
            for job in range(worker, batch * heads, workers):
                s, head = job // heads, job % heads
                for block in range(0, channels, width):
                    rest, in_block = channels - block, min(width, channels - block) // n
                    offset, per = size * block, per_channel * size * block
                    entering = size * (job * d_qk + block // n) * columns
                    fill(states, d_v * width, long)
                    for m in range(chunks - 1, -1, -1):
                        first, stop = m * steps, min(length, (m + 1) * steps)
                        at = kept + size * ((job * n_kept + m) * d_qk + block // n) * columns
                        _turn(at, columns, states, width, in_block, d_v, n, one)
                        for t in range(first, stop):
                            h = states + (t - first) * next_tile
                            _fetch(dy, s, t + _AHEAD, head, columns, size, short)
                            _fetch(k, s, t + _AHEAD, head, channels, size, short)
                            _fetch(v, s, t + _AHEAD, head, columns, size, short)
                            if with_gates:
                                _fetch(a, s, t + _AHEAD, head, n, size, short)
                            _fetch(dq, s, t + _AHEAD, head, channels, size, short)
                            _step_for_q(
                                _row(dy, s, t, head, size), _row(k, s, t, head, size) + offset,
                                _row(v, s, t, head, size), _row(a, s, t, head, size) + per, h, h + next_tile,
                                _row(dq, s, t, head, size) + offset, d_v, rest, n, per_channel, long, one,
                            )  # fmt: skip
                        if m == chunks - 1:
                            fill(c, d_v * width, long)
                            _turn(dlast + entering, columns, c, width, in_block, d_v, n, one)
                        for t in range(stop - 1, first - 1, -1):
                            _fetch(dy, s, t - _AHEAD, head, columns, size, short)
                            _fetch(q, s, t - _AHEAD, head, channels, size, short)
                            if not with_gates:
                                _fetch(k, s, t - _AHEAD, head, channels, size, short)
                                _fetch(v, s, t - _AHEAD, head, columns, size, short)
                            _fetch(dk, s, t - _AHEAD, head, channels, size, short)
                            _fetch(dv, s, t - _AHEAD, head, columns, size, short)
                            _step_back(
                                _row(dy, s, t, head, size), _row(q, s, t, head, size) + offset,
                                _row(k, s, t, head, size) + offset, _row(v, s, t, head, size),
                                _row(a, s, t, head, size) + per, states + (t - first) * next_tile, c, to_sum,
                                _row(dk, s, t, head, size) + offset, _row(da, s, t, head, size) + per, d_v, rest, n,
                                per_channel, block == 0, with_gates, long, short, one,
                            )  # fmt: skip
                            _add_up(to_sum, _row(dv, s, t, head, size), d_v, n, block == 0, size, short)
                    _turn(c, width, dstate + entering, columns, d_v, in_block, n, one)

    return Kernel(backward)
