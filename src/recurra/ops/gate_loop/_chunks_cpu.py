"""GateLoop with heads and one transition a head on the CPU, as matrix products in chunks of C steps.

    decays    D_ij = prod_{l=j+1..i} a_l (i >= j), up_i = prod_{l<=i} a_l, after_j = prod_{l>j} a_l, whole = up_last
    forward   S = Q K^T;  P = S * D;  Y = up (Q h) + P V;  h' = whole h + K^T (after V)
    backward  dS = (dY V^T) * D;  dV = after (K dh') + P^T dY;  dh = whole dh' + Q^T (up dY);
              dQ = up (dY h^T) + dS K;  dK = after (V dh'^T) + dS^T Q

Every product is rows of numbers times rows of vectors: `_product` keeps four rows of the result in registers. So one
factor is read by single numbers in either direction, and the other lies with its long side along the vectors; dQ and dK
are computed as their transposes, which saves transposing states. The heads of a group share Q and K, thus S, and their
dS are summed before the last products.

A factor can be rounded to bfloat16, in words of two numbers whose products are added in float32 by one instruction:
neighbours in a row ("plain") for the factor read by numbers, and neighbours in a column ("paired") for the one read
by vectors, or for the other if it is read down its columns. In float32 a word is a number, and both are the matrix.

The gradient of a_t sums what flows from steps before t, or the state, to those from t on, or the next state, and
divides by a_t. Where a_t is almost 0, it sums the same with a_t replaced by 1. All other factors are products of the
transitions themselves.

Padding has q = k = v = 0 and a = 1. Products mix steps, so a NaN or an infinity could reach steps before it: the
kernels report numbers that are not finite among their results, and the caller then walks step by step instead.
"""

from functools import cache
from typing import NamedTuple

from recurra.ops._toolkit.launch import Kernel, compile_inline
from recurra.ops._toolkit.vectors import (
    WIDTH,
    Lanes,
    load,
    load_part,
    multiply_add,
    spread,
    store,
    store_part,
    total,
    turn,
    width_of,
    zeros,
)
from recurra.ops._toolkit.words import (
    dot_words,
    lanes_from,
    numbers_in_word,
    word_of_neighbours,
    word_of_rows,
)

_ROWS = 4  # of a product in registers
_FLOAT = 4  # bytes
_short, _one, _long = Lanes("float32", WIDTH), Lanes("float32", 1), Lanes("float32", 2 * WIDTH)


@compile_inline
def _row(tensor, sequence, time, head):  # type: ignore[no-untyped-def]
    """Return the address of the channels of one head at one step."""
    start, batch_stride, time_stride, head_stride = tensor
    return start + _FLOAT * (sequence * batch_stride + time * time_stride + head * head_stride)


@compile_inline
def _move(source, pitch, out, out_pitch, n_rows, columns):  # type: ignore[no-untyped-def]
    """Copy rows; return a vector that is 0 if all their numbers are finite."""
    bad, none = zeros(_short), zeros(_short)
    for i in range(n_rows):
        for at in range(0, columns, WIDTH):
            x = load_part(source, i * pitch + at, columns - at, _short)
            store_part(out, i * out_pitch + at, columns - at, _short, x)
            bad = multiply_add(x, none, bad)
    return bad


@compile_inline
def _fill(address, count):  # type: ignore[no-untyped-def]
    for at in range(0, count, WIDTH):
        store(address, at, _short, zeros(_short))


@compile_inline
def _gather(tensor, sequence, start, n, head, columns, out, pitch, steps):  # type: ignore[no-untyped-def]
    """Copy a chunk's rows of one head to dense memory, whose further columns are 0, and pad it with steps of 0."""
    _move(_row(tensor, sequence, start, head), tensor[2], out, pitch, n, columns)
    _fill(out + _FLOAT * n * pitch, (steps - n) * pitch)


@compile_inline
def _turn(source, n_rows, n_columns, out):  # type: ignore[no-untyped-def]
    """Transpose a dense matrix whose sides are multiples of a vector."""
    for i in range(0, n_rows, WIDTH):
        for j in range(0, n_columns, WIDTH):
            at, to = i * n_columns + j, j * n_rows + i
            turn(source + _FLOAT * at, n_columns, out + _FLOAT * to, n_rows, WIDTH, WIDTH, _short)


@compile_inline
def _plain(x, out, count, words):  # type: ignore[no-untyped-def]
    """Return the address of the words of neighbours in rows, which are written to `out` unless they are x itself."""
    if numbers_in_word(words) == 1:
        return x
    for at in range(0, count, 2 * WIDTH):
        store(out, at // 2, _short, word_of_neighbours(load(x, at, _long)))
    return out


@compile_inline
def _paired(x, out, n_rows, columns, words):  # type: ignore[no-untyped-def]
    """Return the address of the words of neighbours in columns, as `_plain` does."""
    if numbers_in_word(words) == 1:
        return x
    for i in range(0, n_rows, 2):
        for at in range(i * columns, (i + 1) * columns, WIDTH):
            to = at - i // 2 * columns
            store(out, to, _short, word_of_rows(load(x, at, _short), load(x, at + columns, _short)))
    return out


@compile_inline
def _tile(a, a_row, a_step, b, b_step, first, stop, long, words):  # type: ignore[no-untyped-def]
    """Multiply four rows of A by a block of columns of B, from word `first` to word `stop`."""
    x, y, z, w = zeros(long), zeros(long), zeros(long), zeros(long)
    for n in range(first, stop):
        row, at = load(b, n * b_step, long), n * a_step
        x = dot_words(spread(load(a, at, _one), long), row, x, words)
        y = dot_words(spread(load(a, at + a_row, _one), long), row, y, words)
        z = dot_words(spread(load(a, at + 2 * a_row, _one), long), row, z, words)
        w = dot_words(spread(load(a, at + 3 * a_row, _one), long), row, w, words)
    return x, y, z, w


@compile_inline
def _finish(x, out, to, factors, i, keep):  # type: ignore[no-untyped-def]
    """Write keep * out + factor * x to a row of a block."""
    if factors != 0:
        x = x * spread(load(factors, i, _one), _long)
    if keep != 0:
        x = multiply_add(load(out, to, _long), spread(load(keep, 0, _one), _long), x)
    store(out, to, _long, x)


@compile_inline
def _product(a, a_row, a_step, b, n, out, n_rows, columns, factors, keep, grow, skip, words):  # type: ignore[no-untyped-def]
    """Write keep * out + factor * (A B), with a factor for each row; addresses of 0 stand for factors of 1 and keep 0.

    With `grow`, A is square and 0 above its diagonal; with `skip`, below it.
    """
    word = numbers_in_word(words)
    for column in range(0, columns, width_of(_long)):
        for i in range(0, n_rows, _ROWS):
            stop, at = n - grow * ((n_rows - _ROWS - i) // word), i * columns + column
            rows, panel, begin = a + _FLOAT * i * a_row, b + _FLOAT * column, skip * (i // word)
            x, y, z, w = _tile(rows, a_row, a_step, panel, columns, begin, stop, _long, words)
            _finish(x, out, at, factors, i, keep)
            _finish(y, out, at + columns, factors, i + 1, keep)
            _finish(z, out, at + 2 * columns, factors, i + 2, keep)
            _finish(w, out, at + 3 * columns, factors, i + 3, keep)


@compile_inline
def _decays(a, sequence, start, n, head, gates, up, after, steps):  # type: ignore[no-untyped-def]
    """Write the transitions of a chunk and their products up to and after each step."""
    one = lanes_from(0, _one)
    for i in range(steps):
        store(gates, i, _one, load(_row(a, sequence, start + i, head), 0, _one) if i < n else one)
    store(up, 0, _one, load(gates, 0, _one))
    store(after, steps - 1, _one, one)
    for i in range(1, steps):
        store(up, i, _one, load(up, i - 1, _one) * load(gates, i, _one))
        j = steps - 1 - i
        store(after, j, _one, load(after, j + 1, _one) * load(gates, j + 1, _one))


@compile_inline
def _scaled_rows(x, factors, out, n_rows, columns):  # type: ignore[no-untyped-def]
    for i in range(n_rows):
        factor = spread(load(factors, i, _one), _short)
        for at in range(i * columns, (i + 1) * columns, WIDTH):
            store(out, at, _short, load(x, at, _short) * factor)


@compile_inline
def _identity(i, long):  # type: ignore[no-untyped-def]
    return lanes_from(i, long) - lanes_from(i + 1, long)


class Sizes(NamedTuple):
    """What a kernel must know: the sizes of the tensors, the padded channels, and the floats of a worker's memory."""

    batch: int
    length: int
    groups: int
    heads: int
    d_qk: int
    d_v: int
    p: int
    r: int
    share: int
    workers: int


class _Forward(NamedTuple):
    """Addresses in a worker's memory: q, k, k^T, S and P, v, y, of the transitions, and of words.

    States lie before them.
    """

    q: int
    k: int
    kt: int
    scores: int
    weights: int
    v: int
    y: int
    gates: int
    up: int
    after: int
    one: int
    q_words: int
    k_words: int
    kt_words: int
    free: int


def forward_floats(steps: int, p: int, r: int, heads: int) -> int:
    """Count the floats of a worker's memory for this many heads of a group."""
    words = steps * p + p * steps // 2 + max(p * r, steps * (steps + r)) // 2
    return heads * p * r + steps * (3 * p + 2 * steps + 2 * r + 3) + WIDTH + words


@compile_inline
def _forward_room(start, steps, p, r):  # type: ignore[no-untyped-def]
    wide, high, square, row = _FLOAT * steps * p, _FLOAT * steps * r, _FLOAT * steps * steps, _FLOAT * steps
    v = start + 3 * wide + 2 * square
    gates = v + 2 * high
    one = gates + 3 * row
    words = one + _FLOAT * WIDTH
    return _Forward(
        start, start + wide, start + 2 * wide, start + 3 * wide, start + 3 * wide + square, v, v + high,
        gates, gates + row, gates + 2 * row, one, words, words + wide // 2, words + wide, words + 3 * wide // 2,
    )  # fmt: skip


@compile_inline
def _read_keys(q, k, s, start, n, group, room, sizes, time, words):  # type: ignore[no-untyped-def]
    """Gather what the heads of a group share, and multiply their scores."""
    steps, p, word = width_of(time), sizes.p, numbers_in_word(words)
    _gather(q, s, start, n, group, sizes.d_qk, room.q, p, steps)
    _gather(k, s, start, n, group, sizes.d_qk, room.k, p, steps)
    _turn(room.k, steps, p, room.kt)
    q_plain = _plain(room.q, room.q_words, steps * p, words)
    kt_paired = _paired(room.kt, room.kt_words, p, steps, words)
    _product(q_plain, p // word, 1, kt_paired, p // word, room.scores, steps, steps, 0, 0, 0, 0, words)
    return q_plain, _paired(room.k, room.k_words, steps, p, words)


@compile_inline
def _weights(room, time):  # type: ignore[no-untyped-def]
    """Multiply scores by decays; above the diagonal both are 0."""
    decay, steps = zeros(time), width_of(time)
    for i in range(steps):
        decay = multiply_add(spread(load(room.gates, i, _one), time), decay, _identity(i, time))
        store(room.weights, i * steps, time, load(room.scores, i * steps, time) * decay)


@compile_inline
def _head_forward(q_plain, k_paired, h, y, pitch, n, room, sizes, time, words):  # type: ignore[no-untyped-def]
    """Write a chunk's y of one head, and take its state to the next chunk; v and the decays have been read."""
    steps, p, r, word = width_of(time), sizes.p, sizes.r, numbers_in_word(words)
    _weights(room, time)
    h_paired = _paired(h, room.free, p, r, words)
    _product(q_plain, p // word, 1, h_paired, p // word, room.y, steps, r, room.up, 0, 0, 0, words)
    p_plain = _plain(room.weights, room.free, steps * steps, words)
    v_paired = _paired(room.v, room.free + _FLOAT * steps * steps // 2, steps, r, words)
    _product(p_plain, steps // word, 1, v_paired, steps // word, room.y, steps, r, 0, room.one, 1, 0, words)
    _scaled_rows(room.v, room.after, room.v, steps, r)
    v_paired, whole = _paired(room.v, room.free, steps, r, words), room.up + _FLOAT * (steps - 1)
    _product(k_paired, 1, p, v_paired, steps // word, h, p, r, 0, whole, 0, 0, words)
    return _move(room.y, r, y, pitch, n, sizes.d_v)


@compile_inline
def words_size(is_dense, words):  # type: ignore[no-untyped-def]
    """Return the bytes of a number in the kept states: those without padding are kept as plain words."""
    return _FLOAT // numbers_in_word(words) if is_dense else _FLOAT


@cache
def forward_kernel(number: str, steps: int) -> Kernel:
    """Return the kernel for words of this type and chunks of this many steps; it compiles when first called.

    It writes NaN to the worker's place in `found` if some y is not finite, else 0.
    """
    words, time = Lanes(number, WIDTH), Lanes("float32", steps)

    def forward(q, k, v, a, state, y, last, kept, found, scratch, sizes, share):  # type: ignore[no-untyped-def]
        heads, of_group, n_chunks = sizes.heads, sizes.heads // sizes.groups, (sizes.length + steps - 1) // steps
        d_qk, d_v, of_state, dense = sizes.d_qk, sizes.d_v, sizes.p * sizes.r, sizes.d_qk * sizes.d_v
        size = words_size(dense == of_state, words)
        for worker in range(share[0], share[1]):
            states = scratch + _FLOAT * worker * sizes.share
            room = _forward_room(states + _FLOAT * of_group * of_state, steps, sizes.p, sizes.r)
            _fill(states, sizes.share)
            store(room.one, 0, _one, lanes_from(0, _one))
            bad = zeros(_short)
            for job in range(worker, sizes.batch * sizes.groups, sizes.workers):
                s, group = job // sizes.groups, job % sizes.groups
                first = s * heads + group * of_group
                for i in range(of_group):
                    _move(state + _FLOAT * (first + i) * dense, d_v, states + _FLOAT * i * of_state, sizes.r, d_qk, d_v)
                for m in range(n_chunks):
                    start, n = m * steps, min(steps, sizes.length - m * steps)
                    q_plain, k_paired = _read_keys(q, k, s, start, n, group, room, sizes, time, words)
                    for i in range(of_group):
                        head, h = group * of_group + i, states + _FLOAT * i * of_state
                        if kept != 0:
                            to = kept + size * ((first + i) * n_chunks + m) * dense
                            if size == _FLOAT:
                                _move(h, sizes.r, to, d_v, d_qk, d_v)
                            else:
                                _plain(h, to, dense, words)
                        _gather(v, s, start, n, head, d_v, room.v, sizes.r, steps)
                        _decays(a, s, start, n, head, room.gates, room.up, room.after, steps)
                        place = _row(y, s, start, head)
                        bad = bad + _head_forward(q_plain, k_paired, h, place, y[2], n, room, sizes, time, words)
                for i in range(of_group):
                    _move(states + _FLOAT * i * of_state, sizes.r, last + _FLOAT * (first + i) * dense, d_v, d_qk, d_v)
            store(found, worker, _one, total(bad))

    return Kernel(forward)
