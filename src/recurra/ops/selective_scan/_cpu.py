"""The selective scan on the CPU in float32: one kernel forward, one for all gradients.

    forward   h_t = exp(s_t a) h_{t-1} + s_t x_t b_t;  y_t = c_t h_t
    backward  g_t = c_t dy_t + exp(s_{t+1} a) g_{t+1};  u_t = g_t h_{t-1} exp(s_t a), what exp's argument gets;
              dc_t = sum_d dy_t h_t;  db_t = sum_d g_t s_t x_t;  w_t = sum_n g_t b_t
              dx_t = w_t s_t;  ds_t = w_t x_t + sum_n u_t a;  da = sum_t u_t s_t

A job is a tile of channels of one sequence, with all its modes. Its states and eigenvalues lie together in a scratch
buffer, (modes, tile): in the tensors they are whole rows apart, and would fall on the same lines of the cache. The
forward kernel keeps the states before every `STEPS`th step; the backward kernel computes those between again, and sums
over channels tile by tile (the caller adds the tiles).
"""

from numba import prange

from recurra.ops._toolkit.launch import Kernel, compile_inline
from recurra.ops._toolkit.vector_math import exp
from recurra.ops._toolkit.vectors import (
    WIDTH,
    Lanes,
    load,
    multiply_add,
    prefetch,
    spread,
    store,
    total,
    width_of,
    zeros,
)

TILE = 4 * WIDTH  # channels of a job: with 16 modes, states and eigenvalues fill 8 KiB
STEPS = 16  # between kept states: so these take as much memory as the inputs, and a block fits the cache
_FLOATS, _ONE = Lanes("float32", WIDTH), Lanes("float32", 1)
_AHEAD = 4  # steps: how far ahead of the walk rows are fetched


def scratch_floats(n_modes: int) -> int:
    """Return the floats of scratch memory that a worker needs (the backward kernel, which needs more)."""
    return (3 + 2 * STEPS + 1) * n_modes * TILE + 2 * TILE


@compile_inline
def _copy_tile(source, target, n_modes, row, width, to_scratch):  # type: ignore[no-untyped-def]
    """Copy (n_modes, width) between rows of `row` floats and the scratch buffer's rows of TILE."""
    for i in range(n_modes):
        start, goal = source + 4 * i * (row if to_scratch else TILE), target + 4 * i * (TILE if to_scratch else row)
        for d in range(width):
            store(goal, d, _ONE, load(start, d, _ONE))


@compile_inline
def _step(x, step, y, b, c, a, h, far, n_modes, start, stop, lanes):  # type: ignore[no-untyped-def]
    """Take one step in the channels from `start` to `stop` of a tile; `far` floats ahead lie the rows to fetch."""
    for d in range(start, stop, width_of(lanes)):
        prefetch(x, d + far, lanes)
        prefetch(step, d + far, lanes)
        s_t, y_t = load(step, d, lanes), zeros(lanes)
        drive = s_t * load(x, d, lanes)
        for i in range(n_modes):
            at = i * TILE + d
            entering = exp(s_t * load(a, at, lanes)) * load(h, at, lanes)
            h_t = multiply_add(spread(load(b, i, _ONE), lanes), drive, entering)
            store(h, at, lanes, h_t)
            y_t = multiply_add(spread(load(c, i, _ONE), lanes), h_t, y_t)
        store(y, d, lanes, y_t)


@compile_inline
def _again(x, step, b, a, h, transitions, n_modes, start, stop, lanes):  # type: ignore[no-untyped-def]
    """Take one step from the states at h to those behind them, and write its transitions."""
    after = h + 4 * n_modes * TILE
    for d in range(start, stop, width_of(lanes)):
        s_t = load(step, d, lanes)
        drive = s_t * load(x, d, lanes)
        for i in range(n_modes):
            at = i * TILE + d
            a_t = exp(s_t * load(a, at, lanes))
            store(transitions, at, lanes, a_t)
            store(after, at, lanes, multiply_add(spread(load(b, i, _ONE), lanes), drive, a_t * load(h, at, lanes)))


@compile_inline
def _mode_back(dy, x, step, b, c, a, h, transitions, g, da, w, u, at, after, start, stop, lanes):  # type: ignore[no-untyped-def]
    """Take one step back in one mode, at float `at` of the tile's rows; return this mode's sums for db and dc."""
    for_b, for_c = zeros(lanes), zeros(lanes)
    for d in range(start, stop, width_of(lanes)):
        dy_t, s_t, a_t = load(dy, d, lanes), load(step, d, lanes), load(transitions, at + d, lanes)
        g_t = multiply_add(c, dy_t, load(g, at + d, lanes))
        for_c = multiply_add(dy_t, load(h, at + after + d, lanes), for_c)
        for_b = multiply_add(g_t, s_t * load(x, d, lanes), for_b)
        carried = a_t * g_t
        u_t = carried * load(h, at + d, lanes)
        store(g, at + d, lanes, carried)
        store(w, d, lanes, multiply_add(g_t, b, load(w, d, lanes)))
        store(u, d, lanes, multiply_add(u_t, load(a, at + d, lanes), load(u, d, lanes)))
        store(da, at + d, lanes, multiply_add(u_t, s_t, load(da, at + d, lanes)))
    return total(for_b), total(for_c)


@compile_inline
def _inputs_back(x, step, w, u, dx, dstep, start, stop, lanes):  # type: ignore[no-untyped-def]
    """Write the gradients of the input and the step size from the sums over modes, and clear these."""
    for d in range(start, stop, width_of(lanes)):
        w_t = load(w, d, lanes)
        store(dx, d, lanes, w_t * load(step, d, lanes))
        store(dstep, d, lanes, multiply_add(w_t, load(x, d, lanes), load(u, d, lanes)))
        store(w, d, lanes, zeros(lanes))
        store(u, d, lanes, zeros(lanes))


@compile_inline
def _clear(address, count):  # type: ignore[no-untyped-def]
    for i in range(count):
        store(address, i, _ONE, zeros(_ONE))


@Kernel
def selective_forward(x, step, a, b, c, h, y, kept, scratch, batch, length, row, n_modes, size, workers):  # type: ignore[no-untyped-def]
    """Fill y (batch, length, row) and kept, and turn h (batch, n_modes, row) from the first state into the last."""
    tiles, n_blocks = (row + TILE - 1) // TILE, (length + STEPS - 1) // STEPS
    for worker in prange(workers):
        a_tile = scratch + 4 * worker * size
        h_tile = a_tile + 4 * n_modes * TILE
        for job in range(worker, batch * tiles, workers):
            n, first = job // tiles, (job % tiles) * TILE
            width = min(TILE, row - first)
            vectors = width // WIDTH * WIDTH
            state = h + 4 * (n * n_modes * row + first)
            _copy_tile(a + 4 * first, a_tile, n_modes, row, width, True)
            _copy_tile(state, h_tile, n_modes, row, width, True)
            for t in range(length):
                if kept != 0 and t % STEPS == 0:
                    place = kept + 4 * ((n * n_blocks + t // STEPS) * n_modes * row + first)
                    _copy_tile(h_tile, place, n_modes, row, width, False)
                at, of_modes = 4 * ((n * length + t) * row + first), 4 * (n * length + t) * n_modes
                x_t, s_t, y_t, b_t, c_t = x + at, step + at, y + at, b + of_modes, c + of_modes
                _step(x_t, s_t, y_t, b_t, c_t, a_tile, h_tile, _AHEAD * row, n_modes, 0, vectors, _FLOATS)
                _step(x_t, s_t, y_t, b_t, c_t, a_tile, h_tile, 0, n_modes, vectors, width, _ONE)
            _copy_tile(h_tile, state, n_modes, row, width, False)


@Kernel
def selective_backward(  # type: ignore[no-untyped-def]
    dy, x, step, a, b, c, kept, g, dx, dstep, da, db, dc, scratch, batch, length, row, n_modes, size, workers
):
    """Fill dx, dstep, da (batch, n_modes, row), db and dc (tiles, batch, length, n_modes); g from last to first."""
    tiles, n_blocks = (row + TILE - 1) // TILE, (length + STEPS - 1) // STEPS
    floats = n_modes * TILE  # of one tile's states
    for worker in prange(workers):
        a_tile = scratch + 4 * worker * size
        g_tile, da_tile, transitions = a_tile + 4 * floats, a_tile + 8 * floats, a_tile + 12 * floats
        states = transitions + 4 * STEPS * floats
        w = states + 4 * (STEPS + 1) * floats
        u = w + 4 * TILE
        for job in range(worker, batch * tiles, workers):
            tile, n = job % tiles, job // tiles
            first = tile * TILE
            width = min(TILE, row - first)
            vectors = width // WIDTH * WIDTH
            corner = 4 * (n * n_modes * row + first)
            _copy_tile(a + 4 * first, a_tile, n_modes, row, width, True)
            _copy_tile(g + corner, g_tile, n_modes, row, width, True)
            _clear(da_tile, floats)
            _clear(w, 2 * TILE)
            for i_block in range(n_blocks):
                block = n_blocks - 1 - i_block
                t0 = block * STEPS
                steps = min(STEPS, length - t0)
                place = kept + 4 * ((n * n_blocks + block) * n_modes * row + first)
                _copy_tile(place, states, n_modes, row, width, True)
                for j in range(steps):
                    at, b_t = 4 * ((n * length + t0 + j) * row + first), b + 4 * (n * length + t0 + j) * n_modes
                    h_t, a_t = states + 4 * j * floats, transitions + 4 * j * floats
                    _again(x + at, step + at, b_t, a_tile, h_t, a_t, n_modes, 0, vectors, _FLOATS)
                    _again(x + at, step + at, b_t, a_tile, h_t, a_t, n_modes, vectors, width, _ONE)
                for i_step in range(steps):
                    j = steps - 1 - i_step
                    time = n * length + t0 + j
                    at, b_t, c_t = 4 * (time * row + first), b + 4 * time * n_modes, c + 4 * time * n_modes
                    dy_t, x_t, s_t = dy + at, x + at, step + at
                    h_t, a_t = states + 4 * j * floats, transitions + 4 * j * floats
                    to = (tile * batch * length + time) * n_modes
                    for i in range(n_modes):
                        b_i, c_i = load(b_t, i, _ONE), load(c_t, i, _ONE)
                        many_b, many_c = _mode_back(
                            dy_t, x_t, s_t, spread(b_i, _FLOATS), spread(c_i, _FLOATS), a_tile, h_t, a_t, g_tile,
                            da_tile, w, u, i * TILE, floats, 0, vectors, _FLOATS,
                        )  # fmt: skip
                        one_b, one_c = _mode_back(
                            dy_t, x_t, s_t, b_i, c_i, a_tile, h_t, a_t, g_tile,
                            da_tile, w, u, i * TILE, floats, vectors, width, _ONE,
                        )  # fmt: skip
                        store(db, to + i, _ONE, many_b + one_b)
                        store(dc, to + i, _ONE, many_c + one_c)
                    _inputs_back(x_t, s_t, w, u, dx + at, dstep + at, 0, vectors, _FLOATS)
                    _inputs_back(x_t, s_t, w, u, dx + at, dstep + at, vectors, width, _ONE)
            _copy_tile(g_tile, g + corner, n_modes, row, width, False)
            _copy_tile(da_tile, da + corner, n_modes, row, width, False)
