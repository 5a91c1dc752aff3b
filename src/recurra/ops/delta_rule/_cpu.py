"""The gated delta rule on the CPU, step by step and without derivatives: one kernel.

A job is a head of a sequence. Columns of the state do not meet, so a step runs over blocks of them, and each block is
walked twice: to read the value that the key has, w = b (v - a k h), and to write h = a h + k^T w and read y = q h.
A block of 64 columns is four vectors wide, so that four sums are in flight, and small enough for the first-level cache,
where the second walk finds what the first has read.
"""

from numba import prange

from recurra.ops._toolkit.launch import Kernel, compile_inline
from recurra.ops._toolkit.vectors import WIDTH, Lanes, load, multiply_add, spread, store, width_of, zeros

_BLOCK = 4 * WIDTH
_LONG, _FLOATS, _ONE = Lanes("float32", _BLOCK), Lanes("float32", WIDTH), Lanes("float32", 1)


@compile_inline
def _step(q, k, v, a_t, b_t, h, last, y, d_qk, d_v, start, stop, lanes):  # type: ignore[no-untyped-def]
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


@Kernel
def delta_rule_forward(q, k, v, a, b, h, last, y, batch, length, heads, d_qk, d_v):  # type: ignore[no-untyped-def]
    blocks, vectors = d_v // _BLOCK * _BLOCK, d_v // WIDTH * WIDTH
    for job in prange(batch * heads):
        n, head = job // heads, job % heads
        before, now = h + 4 * job * d_qk * d_v, last + 4 * job * d_qk * d_v
        for t in range(length):
            at = (n * length + t) * heads + head
            q_t, k_t, v_t, y_t = q + 4 * at * d_qk, k + 4 * at * d_qk, v + 4 * at * d_v, y + 4 * at * d_v
            a_t, b_t = a + 4 * at, b + 4 * at
            _step(q_t, k_t, v_t, a_t, b_t, before, now, y_t, d_qk, d_v, 0, blocks, _LONG)
            _step(q_t, k_t, v_t, a_t, b_t, before, now, y_t, d_qk, d_v, blocks, vectors, _FLOATS)
            _step(q_t, k_t, v_t, a_t, b_t, before, now, y_t, d_qk, d_v, vectors, d_v, _ONE)
            before = now
