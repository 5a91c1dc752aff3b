"""The steps of recurrent cells over a sequence on the CPU: GRUs with a reset before or after the product, and sLSTMs.

A step multiplies the states of a few sequences by matrices that hardly fit the second-level cache. The kernels take all
steps in one call, so the matrices stay as near as they can. All is float32 and dense, with time first: rows of a step,
one for each sequence, and a gate's part of a row is `size` floats. A job is a share of the batch. The heads of an sLSTM
never meet, so they come before time, and a job is a head and a share.

A matrix is laid out in panels of 64 columns: (panels, inputs, 64), the last one filled up with zeros, to be read from
end to end. Five rows of the batch meet each of its vectors: 20 sums in registers.
"""

from recurra.ops._toolkit.launch import Kernel, compile_inline
from recurra.ops._toolkit.vector_math import divide, exp, maximum, sigmoid, softplus, tanh
from recurra.ops._toolkit.vectors import WIDTH, Lanes, load, load_part, multiply_add, spread, store_part, zeros

_PANEL = 64  # columns
_LONG, _SHORT, _ONE = Lanes("float32", _PANEL), Lanes("float32", WIDTH), Lanes("float32", 1)
_ROWS = 5


@compile_inline
def _product(x, x_pitch, weights, n_in, n_out, start, start_pitch, out, out_pitch, n_rows):  # type: ignore[no-untyped-def]
    """out = start + x weights for some rows, which are so many floats apart; `start` can be `out`."""
    for panel in range(0, n_out, _PANEL):
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
                w_i = load(w, i * _PANEL, _LONG)
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
def _part(address, at, rest):  # type: ignore[no-untyped-def]
    """Load a vector of a row, of which `rest` numbers are left from `at` on."""
    return load_part(address, at, rest, _SHORT)


@compile_inline
def _keep(address, at, rest, vector):  # type: ignore[no-untyped-def]
    """Store what `_part` would load."""
    store_part(address, at, rest, _SHORT, vector)


@compile_inline
def _slope(u):  # type: ignore[no-untyped-def]
    """Give the derivative of a sigmoid whose value is u."""
    return u - u * u


@Kernel
def gru_forward(projected, of_gates, of_candidate, ru, c, reset, states, length, batch, size, span, share):  # type: ignore[no-untyped-def]
    """CRT (4): r and u from h, then c from r h; h' = h + u (c - h)."""
    for job in range(share[0], share[1]):
        first, n_rows = job * span, min(span, batch - job * span)
        for t in range(length):
            at = t * batch + first
            x_t, ru_t, c_t = projected + 12 * at * size, ru + 8 * at * size, c + 4 * at * size
            reset_t, h, later = reset + 4 * at * size, states + 4 * at * size, states + 4 * (at + batch) * size
            _product(h, size, of_gates, size, 2 * size, x_t, 3 * size, ru_t, 2 * size, n_rows)
            for row in range(n_rows):
                gates, here = ru_t + 8 * row * size, 4 * row * size
                for d in range(0, size, WIDTH):
                    r = sigmoid(_part(gates, d, size - d))
                    _keep(gates, d, size - d, r)
                    _keep(reset_t + here, d, size - d, r * _part(h + here, d, size - d))
                for d in range(size, 2 * size, WIDTH):
                    _keep(gates, d, 2 * size - d, sigmoid(_part(gates, d, 2 * size - d)))
            _product(reset_t, size, of_candidate, size, size, x_t + 8 * size, 3 * size, c_t, size, n_rows)
            for row in range(n_rows):
                u_row, here = ru_t + 4 * (2 * row + 1) * size, 4 * row * size
                for d in range(0, size, WIDTH):
                    new, before = tanh(_part(c_t + here, d, size - d)), _part(h + here, d, size - d)
                    _keep(c_t + here, d, size - d, new)
                    _keep(later + here, d, size - d, before + _part(u_row, d, size - d) * (new - before))


@Kernel
def gru_backward(  # type: ignore[no-untyped-def]
    dy, ru, c, states, of_gates, of_candidate, d_inputs, d_h, d_reset, length, batch, size, span, share
):
    """Fill d_inputs backwards; d_h holds the gradient of the last state, and at the end that of the first."""
    for job in range(share[0], share[1]):
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
                    g = _part(carry + here, d, rest) + _part(dy_t + here, d, rest)
                    u, new = _part(u_row, d, rest), _part(c_t + here, d, rest)
                    through = g * u
                    _keep(d_row + 8 * size, d, rest, through - through * new * new)
                    _keep(d_row + 4 * size, d, rest, g * (new - _part(h + here, d, rest)) * _slope(u))
                    _keep(carry + here, d, rest, g - through)
                    _keep(to_reset + here, d, rest, g - g)
            _product(d_t + 8 * size, 3 * size, of_candidate, size, size, to_reset, size, to_reset, size, n_rows)
            for row in range(n_rows):
                here, r_row, d_row = 4 * row * size, ru_t + 8 * row * size, d_t + 12 * row * size
                for d in range(0, size, WIDTH):
                    rest = size - d
                    g, r = _part(to_reset + here, d, rest), _part(r_row, d, rest)
                    _keep(d_row, d, rest, g * _part(h + here, d, rest) * _slope(r))
                    _keep(carry + here, d, rest, _part(carry + here, d, rest) + g * r)
            _product(d_t, 3 * size, of_gates, 2 * size, size, carry, size, carry, size, n_rows)


@Kernel
def gru_after_forward(projected, weights, ru, c, hidden, states, length, batch, size, span, share):  # type: ignore[no-untyped-def]
    """torch.nn.GRU, whose reset gate acts after the product; `hidden` starts as its bias: h' = c + u (h - c)."""
    for job in range(share[0], share[1]):
        first, n_rows = job * span, min(span, batch - job * span)
        for t in range(length):
            at = t * batch + first
            x_t, ru_t, c_t = projected + 12 * at * size, ru + 8 * at * size, c + 4 * at * size
            hidden_t, h = hidden + 12 * at * size, states + 4 * at * size
            _product(h, size, weights, size, 3 * size, hidden_t, 3 * size, hidden_t, 3 * size, n_rows)
            for row in range(n_rows):
                here, wide, gates = 4 * row * size, 12 * row * size, ru_t + 8 * row * size
                for d in range(0, size, WIDTH):
                    rest = size - d
                    r = sigmoid(_part(x_t + wide, d, rest) + _part(hidden_t + wide, d, rest))
                    u = sigmoid(_part(x_t + wide + 4 * size, d, rest) + _part(hidden_t + wide + 4 * size, d, rest))
                    of_c = r * _part(hidden_t + wide + 8 * size, d, rest)
                    new = tanh(_part(x_t + wide + 8 * size, d, rest) + of_c)
                    _keep(gates, d, rest, r)
                    _keep(gates + 4 * size, d, rest, u)
                    _keep(c_t + here, d, rest, new)
                    later = new + u * (_part(h + here, d, rest) - new)
                    _keep(h + 4 * batch * size + here, d, rest, later)


@Kernel
def gru_after_backward(  # type: ignore[no-untyped-def]
    dy, ru, c, hidden, states, weights, d_inputs, d_hidden, d_h, length, batch, size, span, share
):
    """Fill d_inputs and d_hidden, which differ in the candidate's part, backwards; d_h as in `gru_backward`."""
    for job in range(share[0], share[1]):
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
                    g = _part(carry + here, d, rest) + _part(dy_t + here, d, rest)
                    r, u, new = _part(gates, d, rest), _part(gates + 4 * size, d, rest), _part(c_t + here, d, rest)
                    kept = g * u
                    d_c = (g - kept) - (g - kept) * new * new
                    d_r = d_c * _part(hidden_t + wide + 8 * size, d, rest) * _slope(r)
                    d_u = g * (_part(h + here, d, rest) - new) * _slope(u)
                    _keep(d_t + wide, d, rest, d_r)
                    _keep(d_hidden_t + wide, d, rest, d_r)
                    _keep(d_t + wide + 4 * size, d, rest, d_u)
                    _keep(d_hidden_t + wide + 4 * size, d, rest, d_u)
                    _keep(d_t + wide + 8 * size, d, rest, d_c)
                    _keep(d_hidden_t + wide + 8 * size, d, rest, d_c * r)
                    _keep(carry + here, d, rest, kept)
            _product(d_hidden_t, 3 * size, weights, 3 * size, size, carry, size, carry, size, n_rows)


@compile_inline
def _panel_bytes(n_in, n_out):  # type: ignore[no-untyped-def]
    """Count the bytes of a matrix in panels."""
    return 4 * n_in * ((n_out + _PANEL - 1) // _PANEL) * _PANEL


@compile_inline
def _log_sigmoid(x):  # type: ignore[no-untyped-def]
    nothing = zeros(_SHORT)
    return nothing - softplus(nothing - x)


@Kernel
def slstm_forward(gates, weights, c, n, m, h, heads, length, batch, size, span, share):  # type: ignore[no-untyped-def]
    """Beck et al. (8)-(17). `gates` comes as the projected inputs; tanh(z), i, f and sigmoid(o) remain there."""
    shares = (batch + span - 1) // span
    for job in range(share[0], share[1]):
        head, first = job // shares, job % shares * span
        n_rows, w = min(span, batch - first), weights + head * _panel_bytes(size, 4 * size)
        for t in range(length):
            at = 4 * ((head * (length + 1) + t) * batch + first) * size
            later, row_t = at + 4 * batch * size, gates + 16 * ((head * length + t) * batch + first) * size
            _product(h + at, size, w, size, 4 * size, row_t, 4 * size, row_t, 4 * size, n_rows)
            for row in range(n_rows):
                z_row, here = row_t + 16 * row * size, at + 4 * row * size
                i_row, f_row, o_row, there = z_row + 4 * size, z_row + 8 * size, z_row + 12 * size, here + later - at
                for d in range(0, size, WIDTH):
                    rest = size - d
                    z, o = tanh(_part(z_row, d, rest)), sigmoid(_part(o_row, d, rest))
                    i, kept = _part(i_row, d, rest), _log_sigmoid(_part(f_row, d, rest)) + _part(m + here, d, rest)
                    unit = maximum(kept, i)
                    forget, write = exp(kept - unit), exp(i - unit)
                    new_c = forget * _part(c + here, d, rest) + write * z
                    new_n = forget * _part(n + here, d, rest) + write
                    _keep(z_row, d, rest, z)
                    _keep(o_row, d, rest, o)
                    _keep(c + there, d, rest, new_c)
                    _keep(n + there, d, rest, new_n)
                    _keep(m + there, d, rest, unit)
                    _keep(h + there, d, rest, divide(o * new_c, new_n))


@Kernel
def slstm_backward(  # type: ignore[no-untyped-def]
    dy, gates, weights, c, n, m, h, d_gates, d_c, d_n, d_h, heads, length, batch, size, span, share
):
    """Fill d_gates backwards; d_c, d_n and d_h hold gradients of the last state, and at the end those of the first."""
    shares = (batch + span - 1) // span
    for job in range(share[0], share[1]):
        head, first = job // shares, job % shares * span
        n_rows, w = min(span, batch - first), weights + head * _panel_bytes(4 * size, size)
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
                    g_h = _part(d_h + back, d, rest) + _part(dy_row, d, rest)
                    z, i = _part(z_row, d, rest), _part(z_row + 4 * size, d, rest)
                    f, o = _part(z_row + 8 * size, d, rest), _part(z_row + 12 * size, d, rest)
                    unit, hidden = _part(m + there, d, rest), _part(h + there, d, rest)
                    forget = exp(_log_sigmoid(f) + _part(m + here, d, rest) - unit)
                    write = exp(i - unit)
                    of_quotient = divide(g_h, _part(n + there, d, rest))
                    g_c = _part(d_c + back, d, rest) + of_quotient * o
                    g_n = _part(d_n + back, d, rest) - of_quotient * hidden
                    g_z = g_c * write
                    to_forget = g_c * _part(c + here, d, rest) + g_n * _part(n + here, d, rest)
                    _keep(dz_row, d, rest, g_z - g_z * z * z)
                    _keep(dz_row + 4 * size, d, rest, g_z * z + g_n * write)
                    _keep(dz_row + 8 * size, d, rest, to_forget * forget * sigmoid(zeros(_SHORT) - f))
                    _keep(dz_row + 12 * size, d, rest, of_quotient * _part(c + there, d, rest) * _slope(o))
                    _keep(d_c + back, d, rest, g_c * forget)
                    _keep(d_n + back, d, rest, g_n * forget)
                    _keep(d_h + back, d, rest, zeros(_SHORT))
            _product(
                d_gates + 16 * now * size, 4 * size, w, 4 * size, size, d_h + carry, size, d_h + carry, size, n_rows
            )
