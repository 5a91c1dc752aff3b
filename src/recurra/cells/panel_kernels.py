"""What the kernels of recurrent cells share: a step's product with a matrix in panels, and parts of rows.

A matrix is laid out in panels of 64 columns: (panels, inputs, 64), the last one filled up with zeros, to be read from
end to end. Five rows of the batch meet each of its vectors: 20 sums in registers. Everything is float32.
"""

from recurra.kernels.launch import compile_inline
from recurra.kernels.vector import WIDTH, Lanes, load, load_part, multiply_add, spread, store_part

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
