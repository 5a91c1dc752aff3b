"""The steps of an sLSTM over a sequence on the CPU: one kernel forward and one backward.

Heads never meet, so each goes through all steps alone, beside a matrix of its own that stays in the second-level cache.
A job is a head and a share of the batch. Everything is float32 and dense, with heads first and then time: rows of a
step, one for each sequence. A gate's part of a row is `size` floats: z, i, f, o.
"""

from functools import cache

from numba import prange

from recurra.ops._toolkit.launch import Kernel, KernelPair, compile_inline
from recurra.ops._toolkit.vector_math import divide, exp, maximum, sigmoid, softplus, tanh
from recurra.ops._toolkit.vectors import WIDTH, Lanes, zeros
from recurra.ops.cells._gru_cpu import PANEL, keep, part, product, slope

_SHORT = Lanes("float32", WIDTH)


@compile_inline
def _panels(n_in, n_out):  # type: ignore[no-untyped-def]
    """Count the bytes of a matrix in panels."""
    return 4 * n_in * ((n_out + PANEL - 1) // PANEL) * PANEL


@compile_inline
def _log_sigmoid(x):  # type: ignore[no-untyped-def]
    nothing = zeros(_SHORT)
    return nothing - softplus(nothing - x)


def _forward(gates, weights, c, n, m, h, heads, length, batch, size, span):  # type: ignore[no-untyped-def]
    """Beck et al. (8)-(17). `gates` comes as the projected inputs; tanh(z), i, f and sigmoid(o) remain there."""
    shares = (batch + span - 1) // span
    for job in prange(heads * shares):
        head, first = job // shares, job % shares * span
        n_rows, w = min(span, batch - first), weights + head * _panels(size, 4 * size)
        for t in range(length):
            at = 4 * ((head * (length + 1) + t) * batch + first) * size
            later, row_t = at + 4 * batch * size, gates + 16 * ((head * length + t) * batch + first) * size
            product(h + at, size, w, size, 4 * size, row_t, 4 * size, row_t, 4 * size, n_rows)
            for row in range(n_rows):
                z_row, here = row_t + 16 * row * size, at + 4 * row * size
                i_row, f_row, o_row, there = z_row + 4 * size, z_row + 8 * size, z_row + 12 * size, here + later - at
                for d in range(0, size, WIDTH):
                    rest = size - d
                    z, o = tanh(part(z_row, d, rest)), sigmoid(part(o_row, d, rest))
                    i, kept = part(i_row, d, rest), _log_sigmoid(part(f_row, d, rest)) + part(m + here, d, rest)
                    unit = maximum(kept, i)
                    forget, write = exp(kept - unit), exp(i - unit)
                    new_c = forget * part(c + here, d, rest) + write * z
                    new_n = forget * part(n + here, d, rest) + write
                    keep(z_row, d, rest, z)
                    keep(o_row, d, rest, o)
                    keep(c + there, d, rest, new_c)
                    keep(n + there, d, rest, new_n)
                    keep(m + there, d, rest, unit)
                    keep(h + there, d, rest, divide(o * new_c, new_n))


def _backward(  # type: ignore[no-untyped-def]
    dy, gates, weights, c, n, m, h, d_gates, d_c, d_n, d_h, heads, length, batch, size, span
):
    """Fill d_gates backwards; d_c, d_n and d_h hold gradients of the last state, and at the end those of the first."""
    shares = (batch + span - 1) // span
    for job in prange(heads * shares):
        head, first = job // shares, job % shares * span
        n_rows, w = min(span, batch - first), weights + head * _panels(4 * size, size)
        carry = 4 * (head * batch + first) * size
        for step in range(length):
            t = length - 1 - step
            at, now = (head * (length + 1) + t) * batch + first, (head * length + t) * batch + first
            for row in range(n_rows):
                here, back, dy_row = 4 * (at + row) * size, carry + 4 * row * size, dy + 4 * (now + row) * size
                there, z_row, dz_row = here + 4 * batch * size, gates + 16 * (now + row) * size, 16 * (now + row) * size
                dz_row += d_gates
                for d in range(0, size, WIDTH):
                    rest = size - d
                    g_h = part(d_h + back, d, rest) + part(dy_row, d, rest)
                    z, i = part(z_row, d, rest), part(z_row + 4 * size, d, rest)
                    f, o = part(z_row + 8 * size, d, rest), part(z_row + 12 * size, d, rest)
                    unit, hidden = part(m + there, d, rest), part(h + there, d, rest)
                    forget = exp(_log_sigmoid(f) + part(m + here, d, rest) - unit)
                    write = exp(i - unit)
                    of_quotient = divide(g_h, part(n + there, d, rest))
                    g_c = part(d_c + back, d, rest) + of_quotient * o
                    g_n = part(d_n + back, d, rest) - of_quotient * hidden
                    g_z = g_c * write
                    to_forget = g_c * part(c + here, d, rest) + g_n * part(n + here, d, rest)
                    keep(dz_row, d, rest, g_z - g_z * z * z)
                    keep(dz_row + 4 * size, d, rest, g_z * z + g_n * write)
                    keep(dz_row + 8 * size, d, rest, to_forget * forget * sigmoid(zeros(_SHORT) - f))
                    keep(dz_row + 12 * size, d, rest, of_quotient * part(c + there, d, rest) * slope(o))
                    keep(d_c + back, d, rest, g_c * forget)
                    keep(d_n + back, d, rest, g_n * forget)
                    keep(d_h + back, d, rest, zeros(_SHORT))
            product(
                d_gates + 16 * now * size, 4 * size, w, 4 * size, size, d_h + carry, size, d_h + carry, size, n_rows
            )


@cache
def slstm_kernels() -> KernelPair:
    """Return the kernels, which compile when first called."""
    return KernelPair(Kernel(_forward), Kernel(_backward))
