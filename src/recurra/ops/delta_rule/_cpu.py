"""The gated delta rule on the CPU, step by step and without derivatives: one kernel.

A job is a head of a sequence. Columns of the state do not meet, so a step runs over blocks of them, and each block is
walked twice: to read the value that the key has, w = b (v - a k h), and to write h = a h + k^T w and read y = q h.
A block of 64 columns is four vectors wide, so that four sums are in flight, and small enough for the first-level cache,
where the second walk finds what the first has read.
"""

from functools import cache

from numba import prange

from recurra.ops._toolkit.launch import Kernel, compile_inline
from recurra.ops._toolkit.vectors import WIDTH, Lanes, load, multiply_add, spread, store, width_of, zeros

_FLOATS, _ONE = Lanes("float32", WIDTH), Lanes("float32", 1)
_BLOCK = 4 * WIDTH


@compile_inline
def _four(q, k, v, a_t, b_t, h, last, y, d_qk, d_v, c):  # type: ignore[no-untyped-def]
    """Take one step in 64 columns from c on."""
    a, b = spread(load(a_t, 0, _ONE), _FLOATS), spread(load(b_t, 0, _ONE), _FLOATS)
    c1, c2, c3 = c + WIDTH, c + 2 * WIDTH, c + 3 * WIDTH
    s0, s1, s2, s3 = zeros(_FLOATS), zeros(_FLOATS), zeros(_FLOATS), zeros(_FLOATS)
    for i in range(d_qk):
        k_i, at = spread(load(k, i, _ONE), _FLOATS), h + 4 * i * d_v
        s0 = multiply_add(k_i, load(at, c, _FLOATS), s0)
        s1 = multiply_add(k_i, load(at, c1, _FLOATS), s1)
        s2 = multiply_add(k_i, load(at, c2, _FLOATS), s2)
        s3 = multiply_add(k_i, load(at, c3, _FLOATS), s3)
    w0, w1 = b * (load(v, c, _FLOATS) - a * s0), b * (load(v, c1, _FLOATS) - a * s1)
    w2, w3 = b * (load(v, c2, _FLOATS) - a * s2), b * (load(v, c3, _FLOATS) - a * s3)
    s0, s1, s2, s3 = zeros(_FLOATS), zeros(_FLOATS), zeros(_FLOATS), zeros(_FLOATS)
    for i in range(d_qk):
        k_i, q_i = spread(load(k, i, _ONE), _FLOATS), spread(load(q, i, _ONE), _FLOATS)
        at, to = h + 4 * i * d_v, last + 4 * i * d_v
        h0 = multiply_add(k_i, w0, a * load(at, c, _FLOATS))
        h1 = multiply_add(k_i, w1, a * load(at, c1, _FLOATS))
        h2 = multiply_add(k_i, w2, a * load(at, c2, _FLOATS))
        h3 = multiply_add(k_i, w3, a * load(at, c3, _FLOATS))
        store(to, c, _FLOATS, h0)
        store(to, c1, _FLOATS, h1)
        store(to, c2, _FLOATS, h2)
        store(to, c3, _FLOATS, h3)
        s0, s1 = multiply_add(q_i, h0, s0), multiply_add(q_i, h1, s1)
        s2, s3 = multiply_add(q_i, h2, s2), multiply_add(q_i, h3, s3)
    store(y, c, _FLOATS, s0)
    store(y, c1, _FLOATS, s1)
    store(y, c2, _FLOATS, s2)
    store(y, c3, _FLOATS, s3)


@compile_inline
def _single(q, k, v, a_t, b_t, h, last, y, d_qk, d_v, start, stop, lanes):  # type: ignore[no-untyped-def]
    """Take one step in the columns from start to stop, a vector of `lanes` at a time."""
    a, b = spread(load(a_t, 0, _ONE), lanes), spread(load(b_t, 0, _ONE), lanes)
    for c in range(start, stop, width_of(lanes)):
        read = zeros(lanes)
        for i in range(d_qk):
            read = multiply_add(spread(load(k, i, _ONE), lanes), load(h + 4 * i * d_v, c, lanes), read)
        w = b * (load(v, c, lanes) - a * read)
        read = zeros(lanes)
        for i in range(d_qk):
            now = multiply_add(spread(load(k, i, _ONE), lanes), w, a * load(h + 4 * i * d_v, c, lanes))
            store(last + 4 * i * d_v, c, lanes, now)
            read = multiply_add(spread(load(q, i, _ONE), lanes), now, read)
        store(y, c, lanes, read)


def _forward(q, k, v, a, b, h, last, y, batch, length, heads, d_qk, d_v):  # type: ignore[no-untyped-def]
    blocks, vectors = d_v // _BLOCK * _BLOCK, d_v // WIDTH * WIDTH
    for job in prange(batch * heads):
        n, head = job // heads, job % heads
        before, now = h + 4 * job * d_qk * d_v, last + 4 * job * d_qk * d_v
        for t in range(length):
            at = (n * length + t) * heads + head
            q_t, k_t, v_t, y_t = q + 4 * at * d_qk, k + 4 * at * d_qk, v + 4 * at * d_v, y + 4 * at * d_v
            a_t, b_t = a + 4 * at, b + 4 * at
            for c in range(0, blocks, _BLOCK):
                _four(q_t, k_t, v_t, a_t, b_t, before, now, y_t, d_qk, d_v, c)
            _single(q_t, k_t, v_t, a_t, b_t, before, now, y_t, d_qk, d_v, blocks, vectors, _FLOATS)
            _single(q_t, k_t, v_t, a_t, b_t, before, now, y_t, d_qk, d_v, vectors, d_v, _ONE)
            before = now


@cache
def delta_rule_kernel() -> Kernel:
    """Return the kernel, which takes the addresses of dense float32 tensors; it compiles when first called."""
    return Kernel(_forward)
