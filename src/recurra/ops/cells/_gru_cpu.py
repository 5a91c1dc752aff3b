"""What the kernels of recurrent cells share: a step's product with a matrix in panels, and parts of rows.

A matrix is laid out in panels of 64 columns: (panels, inputs, 64), the last one filled up with zeros, to be read from
end to end. Five rows of the batch meet each of its vectors: 20 sums in registers. Everything is float32.
"""

from functools import cache

from numba import prange

from recurra.ops._toolkit.launch import Kernel, KernelPair, compile_inline
from recurra.ops._toolkit.vector_math import sigmoid, tanh
from recurra.ops._toolkit.vectors import WIDTH, Lanes, load, load_part, multiply_add, spread, store_part

PANEL = 64
"""Columns of a panel."""
_LONG, _SHORT, _ONE = Lanes("float32", PANEL), Lanes("float32", WIDTH), Lanes("float32", 1)
_ROWS = 5


@compile_inline
def product(x, x_pitch, weights, n_in, n_out, start, start_pitch, out, out_pitch, n_rows):  # type: ignore[no-untyped-def]
    """out = start + x weights for some rows, which are so many floats apart; `start` can be `out`."""
    for panel in range(0, n_out, PANEL):
        w, rest = weights + 4 * panel * n_in, n_out - panel
        for row in range(0, n_rows, _ROWS):
            # rows beyond the last are the last again, computed and written as it is
            last = n_rows - 1
            r1, r2, r3, r4 = min(row + 1, last), min(row + 2, last), min(row + 3, last), min(row + 4, last)
            x0, x1, x2 = x + 4 * row * x_pitch, x + 4 * r1 * x_pitch, x + 4 * r2 * x_pitch
            x3, x4 = x + 4 * r3 * x_pitch, x + 4 * r4 * x_pitch
            o0, o1, o2 = row * out_pitch + panel, r1 * out_pitch + panel, r2 * out_pitch + panel
            o3, o4 = r3 * out_pitch + panel, r4 * out_pitch + panel
            s0 = load_part(start, row * start_pitch + panel, rest, _LONG)
            s1 = load_part(start, r1 * start_pitch + panel, rest, _LONG)
            s2 = load_part(start, r2 * start_pitch + panel, rest, _LONG)
            s3 = load_part(start, r3 * start_pitch + panel, rest, _LONG)
            s4 = load_part(start, r4 * start_pitch + panel, rest, _LONG)
            for i in range(n_in):
                w_i = load(w, i * PANEL, _LONG)
                s0 = multiply_add(spread(load(x0, i, _ONE), _LONG), w_i, s0)
                s1 = multiply_add(spread(load(x1, i, _ONE), _LONG), w_i, s1)
                s2 = multiply_add(spread(load(x2, i, _ONE), _LONG), w_i, s2)
                s3 = multiply_add(spread(load(x3, i, _ONE), _LONG), w_i, s3)
                s4 = multiply_add(spread(load(x4, i, _ONE), _LONG), w_i, s4)
            store_part(out, o0, rest, _LONG, s0)
            store_part(out, o1, rest, _LONG, s1)
            store_part(out, o2, rest, _LONG, s2)
            store_part(out, o3, rest, _LONG, s3)
            store_part(out, o4, rest, _LONG, s4)


@compile_inline
def part(address, at, rest):  # type: ignore[no-untyped-def]
    """Load a vector of a row, of which `rest` numbers are left from `at` on."""
    return load_part(address, at, rest, _SHORT)


@compile_inline
def keep(address, at, rest, vector):  # type: ignore[no-untyped-def]
    """Store what `part` would load."""
    store_part(address, at, rest, _SHORT, vector)


@compile_inline
def slope(u):  # type: ignore[no-untyped-def]
    """Give the derivative of a sigmoid whose value is u."""
    return u - u * u


# --- the steps of both units over a sequence ---
#
# A step multiplies the states of a few sequences by matrices that hardly fit the second-level cache. The kernels take
# all steps in one call, so the matrices stay as near as they can. Everything is dense, with time first: rows of a
# step, one for each sequence. A job is a share of the batch.


def _forward(projected, of_gates, of_candidate, ru, c, reset, states, length, batch, size, span):  # type: ignore[no-untyped-def]
    """CRT (4): r and u from h, then c from r h; h' = h + u (c - h)."""
    for job in prange((batch + span - 1) // span):
        first, n_rows = job * span, min(span, batch - job * span)
        for t in range(length):
            at = t * batch + first
            x_t, ru_t, c_t = projected + 12 * at * size, ru + 8 * at * size, c + 4 * at * size
            reset_t, h, later = reset + 4 * at * size, states + 4 * at * size, states + 4 * (at + batch) * size
            product(h, size, of_gates, size, 2 * size, x_t, 3 * size, ru_t, 2 * size, n_rows)
            for row in range(n_rows):
                gates, here = ru_t + 8 * row * size, 4 * row * size
                for d in range(0, size, WIDTH):
                    r = sigmoid(part(gates, d, size - d))
                    keep(gates, d, size - d, r)
                    keep(reset_t + here, d, size - d, r * part(h + here, d, size - d))
                for d in range(size, 2 * size, WIDTH):
                    keep(gates, d, 2 * size - d, sigmoid(part(gates, d, 2 * size - d)))
            product(reset_t, size, of_candidate, size, size, x_t + 8 * size, 3 * size, c_t, size, n_rows)
            for row in range(n_rows):
                u_row, here = ru_t + 4 * (2 * row + 1) * size, 4 * row * size
                for d in range(0, size, WIDTH):
                    new, before = tanh(part(c_t + here, d, size - d)), part(h + here, d, size - d)
                    keep(c_t + here, d, size - d, new)
                    keep(later + here, d, size - d, before + part(u_row, d, size - d) * (new - before))


def _backward(  # type: ignore[no-untyped-def]
    dy, ru, c, states, of_gates, of_candidate, d_inputs, d_h, d_reset, length, batch, size, span
):
    """Fill d_inputs backwards; d_h holds the gradient of the last state, and at the end that of the first."""
    for job in prange((batch + span - 1) // span):
        first, n_rows = job * span, min(span, batch - job * span)
        carry, to_reset = d_h + 4 * first * size, d_reset + 4 * first * size
        for i in range(length):
            at = (length - 1 - i) * batch + first
            ru_t, c_t, h, dy_t = ru + 8 * at * size, c + 4 * at * size, states + 4 * at * size, dy + 4 * at * size
            d_t = d_inputs + 12 * at * size
            for row in range(n_rows):
                here, u_row, d_row = 4 * row * size, ru_t + 4 * (2 * row + 1) * size, d_t + 12 * row * size
                for d in range(0, size, WIDTH):
                    rest = size - d
                    g = part(carry + here, d, rest) + part(dy_t + here, d, rest)
                    u, new = part(u_row, d, rest), part(c_t + here, d, rest)
                    through = g * u
                    keep(d_row + 8 * size, d, rest, through - through * new * new)
                    keep(d_row + 4 * size, d, rest, g * (new - part(h + here, d, rest)) * slope(u))
                    keep(carry + here, d, rest, g - through)
                    keep(to_reset + here, d, rest, g - g)
            product(d_t + 8 * size, 3 * size, of_candidate, size, size, to_reset, size, to_reset, size, n_rows)
            for row in range(n_rows):
                here, r_row, d_row = 4 * row * size, ru_t + 8 * row * size, d_t + 12 * row * size
                for d in range(0, size, WIDTH):
                    rest = size - d
                    g, r = part(to_reset + here, d, rest), part(r_row, d, rest)
                    keep(d_row, d, rest, g * part(h + here, d, rest) * slope(r))
                    keep(carry + here, d, rest, part(carry + here, d, rest) + g * r)
            product(d_t, 3 * size, of_gates, 2 * size, size, carry, size, carry, size, n_rows)


def _forward_after(projected, weights, ru, c, hidden, states, length, batch, size, span):  # type: ignore[no-untyped-def]
    """torch.nn.GRU, whose reset gate acts after the product; `hidden` starts as its bias: h' = c + u (h - c)."""
    for job in prange((batch + span - 1) // span):
        first, n_rows = job * span, min(span, batch - job * span)
        for t in range(length):
            at = t * batch + first
            x_t, ru_t, c_t = projected + 12 * at * size, ru + 8 * at * size, c + 4 * at * size
            hidden_t, h = hidden + 12 * at * size, states + 4 * at * size
            product(h, size, weights, size, 3 * size, hidden_t, 3 * size, hidden_t, 3 * size, n_rows)
            for row in range(n_rows):
                here, wide, gates = 4 * row * size, 12 * row * size, ru_t + 8 * row * size
                for d in range(0, size, WIDTH):
                    rest = size - d
                    r = sigmoid(part(x_t + wide, d, rest) + part(hidden_t + wide, d, rest))
                    u = sigmoid(part(x_t + wide + 4 * size, d, rest) + part(hidden_t + wide + 4 * size, d, rest))
                    of_c = r * part(hidden_t + wide + 8 * size, d, rest)
                    new = tanh(part(x_t + wide + 8 * size, d, rest) + of_c)
                    keep(gates, d, rest, r)
                    keep(gates + 4 * size, d, rest, u)
                    keep(c_t + here, d, rest, new)
                    later = new + u * (part(h + here, d, rest) - new)
                    keep(h + 4 * batch * size + here, d, rest, later)


def _backward_after(  # type: ignore[no-untyped-def]
    dy, ru, c, hidden, states, weights, d_inputs, d_hidden, d_h, length, batch, size, span
):
    """Fill d_inputs and d_hidden, whose parts for the candidate differ, backwards; d_h as in `_backward`."""
    for job in prange((batch + span - 1) // span):
        first, n_rows = job * span, min(span, batch - job * span)
        carry = d_h + 4 * first * size
        for i in range(length):
            at = (length - 1 - i) * batch + first
            ru_t, c_t, h, dy_t = ru + 8 * at * size, c + 4 * at * size, states + 4 * at * size, dy + 4 * at * size
            hidden_t, d_t, d_hidden_t = hidden + 12 * at * size, d_inputs + 12 * at * size, d_hidden + 12 * at * size
            for row in range(n_rows):
                here, wide, gates = 4 * row * size, 12 * row * size, ru_t + 8 * row * size
                for d in range(0, size, WIDTH):
                    rest = size - d
                    g = part(carry + here, d, rest) + part(dy_t + here, d, rest)
                    r, u, new = part(gates, d, rest), part(gates + 4 * size, d, rest), part(c_t + here, d, rest)
                    kept = g * u
                    d_c = (g - kept) - (g - kept) * new * new
                    d_r = d_c * part(hidden_t + wide + 8 * size, d, rest) * slope(r)
                    d_u = g * (part(h + here, d, rest) - new) * slope(u)
                    keep(d_t + wide, d, rest, d_r)
                    keep(d_hidden_t + wide, d, rest, d_r)
                    keep(d_t + wide + 4 * size, d, rest, d_u)
                    keep(d_hidden_t + wide + 4 * size, d, rest, d_u)
                    keep(d_t + wide + 8 * size, d, rest, d_c)
                    keep(d_hidden_t + wide + 8 * size, d, rest, d_c * r)
                    keep(carry + here, d, rest, kept)
            product(d_hidden_t, 3 * size, weights, 3 * size, size, carry, size, carry, size, n_rows)


@cache
def reset_before() -> KernelPair:
    """Return the kernels of `cells.GRUCell`; they compile when first called."""
    return KernelPair(Kernel(_forward), Kernel(_backward))


@cache
def reset_after() -> KernelPair:
    """Return the kernels of `torch.nn.GRU`; they compile when first called."""
    return KernelPair(Kernel(_forward_after), Kernel(_backward_after))
