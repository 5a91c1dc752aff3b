"""The selective scan on the CPU in float32: one kernel forward, one for all gradients.

    forward   h_t = exp(s_t a) h_{t-1} + s_t x_t b_t;  y_t = c_t h_t
    backward  g_t = c_t dy_t + exp(s_{t+1} a) g_{t+1};  u_t = g_t h_{t-1} exp(s_t a), what exp's argument gets;
              dc_t = sum_d dy_t h_t;  db_t = sum_d g_t s_t x_t;  w_t = sum_n g_t b_t
              dx_t = w_t s_t;  ds_t = w_t x_t + sum_n u_t a;  da = sum_t u_t s_t

A job is a tile of channels of one sequence, with all its modes. Its states and eigenvalues lie together in a scratch
buffer, (modes, tile): in the tensors they are whole rows apart, and would fall on the same lines of the cache. A row of
the buffer is one long vector, with zeros where a narrower tile ends. The forward kernel keeps the states before every
`STEPS`th step; the backward kernel computes those between again, and sums over channels tile by tile (the caller adds
the tiles).
"""

from recurra.ops._toolkit.launch import Kernel, compile_inline
from recurra.ops._toolkit.vector_math import exp
from recurra.ops._toolkit.vectors import (
    WIDTH,
    Lanes,
    folded,
    load,
    load_part,
    multiply_add,
    prefetch,
    spread,
    store,
    store_part,
    totals,
    zeros,
)

TILE = 4 * WIDTH  # channels of a job: with 16 modes, states and eigenvalues fill 8 KiB
STEPS = 16  # between kept states: so these take as much memory as the inputs, and a block fits the cache
_LONG, _SHORT, _ONE = Lanes("float32", TILE), Lanes("float32", WIDTH), Lanes("float32", 1)
_AHEAD = 4  # steps: how far ahead of the walk rows are fetched


def scratch_floats(n_modes: int) -> int:
    """Return the floats of scratch memory that a worker needs (the backward kernel, which needs more)."""
    return (3 + 2 * STEPS + 1) * n_modes * TILE + (n_modes + WIDTH) * WIDTH


@compile_inline
def _copy_tile(source, target, n_modes, row, width, to_scratch):  # type: ignore[no-untyped-def]
    """Copy (n_modes, width) between rows of `row` floats and the scratch buffer's rows of TILE."""
    for i in range(n_modes):
        if to_scratch:
            store(target, i * TILE, _LONG, load_part(source, i * row, width, _LONG))
        else:
            store_part(target, i * row, width, _LONG, load(source, i * TILE, _LONG))


@compile_inline
def _fetch(address, ahead):  # type: ignore[no-untyped-def]
    """Prefetch a tile's part of the row that lies `ahead` floats on."""
    for d in range(0, TILE, WIDTH):
        prefetch(address, d + ahead, _SHORT)


@compile_inline
def _step(x, step, y, b, c, a, h, n_modes, width):  # type: ignore[no-untyped-def]
    """Take one step in the `width` channels of a tile."""
    s_t, y_t = load_part(step, 0, width, _LONG), zeros(_LONG)
    drive = s_t * load_part(x, 0, width, _LONG)
    for i in range(n_modes):
        entering = exp(s_t * load(a, i * TILE, _LONG)) * load(h, i * TILE, _LONG)
        h_t = multiply_add(spread(load(b, i, _ONE), _LONG), drive, entering)
        store(h, i * TILE, _LONG, h_t)
        y_t = multiply_add(spread(load(c, i, _ONE), _LONG), h_t, y_t)
    store_part(y, 0, width, _LONG, y_t)


@compile_inline
def _again(dy, x, step, b, a, h, transitions, sums, n_modes, width):  # type: ignore[no-untyped-def]
    """Take one step from the states at h to those behind them; write its transitions, and vectors whose sums are dc."""
    after = h + 4 * n_modes * TILE
    s_t, dy_t = load_part(step, 0, width, _LONG), load_part(dy, 0, width, _LONG)
    drive = s_t * load_part(x, 0, width, _LONG)
    for i in range(n_modes):
        a_t = exp(s_t * load(a, i * TILE, _LONG))
        h_t = multiply_add(spread(load(b, i, _ONE), _LONG), drive, a_t * load(h, i * TILE, _LONG))
        store(transitions, i * TILE, _LONG, a_t)
        store(after, i * TILE, _LONG, h_t)
        if width < TILE:  # an infinite b times a channel that is not there is NaN
            h_t = load_part(after, i * TILE, width, _LONG)
        store(sums, i * WIDTH, _SHORT, folded(dy_t * h_t))


@compile_inline
def _step_back(dy, x, step, b, c, a, h, transitions, g, da, dx, dstep, sums, n_modes, width):  # type: ignore[no-untyped-def]
    """Take one step back; h are the states before it. Write all gradients but dc, and vectors whose sums are db."""
    s_t, dy_t = load_part(step, 0, width, _LONG), load_part(dy, 0, width, _LONG)
    x_t, w_t, u_a = load_part(x, 0, width, _LONG), zeros(_LONG), zeros(_LONG)
    drive = s_t * x_t
    for i in range(n_modes):
        at = i * TILE
        g_t = multiply_add(spread(load(c, i, _ONE), _LONG), dy_t, load(g, at, _LONG))
        if width < TILE:  # as in `_again`, of an infinite c
            store(g, at, _LONG, g_t)
            g_t = load_part(g, at, width, _LONG)
        w_t = multiply_add(spread(load(b, i, _ONE), _LONG), g_t, w_t)
        store(sums, i * WIDTH, _SHORT, folded(g_t * drive))
        carried = load(transitions, at, _LONG) * g_t
        u_t = carried * load(h, at, _LONG)
        store(g, at, _LONG, carried)
        u_a = multiply_add(u_t, load(a, at, _LONG), u_a)
        store(da, at, _LONG, multiply_add(u_t, s_t, load(da, at, _LONG)))
    store_part(dx, 0, width, _LONG, w_t * s_t)
    store_part(dstep, 0, width, _LONG, multiply_add(w_t, x_t, u_a))


@compile_inline
def _add_up(sums, out, n_modes):  # type: ignore[no-untyped-def]
    """Write the sum of each mode's vector."""
    for i in range(0, n_modes, WIDTH):
        store_part(out, i, n_modes - i, _SHORT, totals(sums + 4 * WIDTH * i, _SHORT))


@Kernel
def selective_forward(x, step, a, b, c, h, y, kept, scratch, batch, length, row, n_modes, size, workers, share):  # type: ignore[no-untyped-def]
    """Fill y (batch, length, row) and kept, and turn h (batch, n_modes, row) from the first state into the last."""
    tiles, n_blocks = (row + TILE - 1) // TILE, (length + STEPS - 1) // STEPS
    for worker in range(share[0], share[1]):
        a_tile = scratch + 4 * worker * size
        h_tile = a_tile + 4 * n_modes * TILE
        for job in range(worker, batch * tiles, workers):
            n, first = job // tiles, (job % tiles) * TILE
            width = min(TILE, row - first)
            state = h + 4 * (n * n_modes * row + first)
            _copy_tile(a + 4 * first, a_tile, n_modes, row, width, True)
            _copy_tile(state, h_tile, n_modes, row, width, True)
            for t in range(length):
                if kept != 0 and t % STEPS == 0:
                    place = kept + 4 * ((n * n_blocks + t // STEPS) * n_modes * row + first)
                    _copy_tile(h_tile, place, n_modes, row, width, False)
                at, of_modes = 4 * ((n * length + t) * row + first), 4 * (n * length + t) * n_modes
                for tensor in (x, step):
                    _fetch(tensor + at, _AHEAD * row)
                _step(x + at, step + at, y + at, b + of_modes, c + of_modes, a_tile, h_tile, n_modes, width)
            _copy_tile(h_tile, state, n_modes, row, width, False)


@Kernel
def selective_backward(  # type: ignore[no-untyped-def]
    dy, x, step, a, b, c, kept, g, dx, dstep, da, db, dc, scratch, batch, length, row, n_modes, size, workers, share
):
    """Fill dx, dstep, da (batch, n_modes, row), db and dc (tiles, batch, length, n_modes); g from last to first."""
    tiles, n_blocks = (row + TILE - 1) // TILE, (length + STEPS - 1) // STEPS
    floats = n_modes * TILE  # of one tile's states
    for worker in range(share[0], share[1]):
        a_tile = scratch + 4 * worker * size
        g_tile, da_tile, transitions = a_tile + 4 * floats, a_tile + 8 * floats, a_tile + 12 * floats
        states = transitions + 4 * STEPS * floats
        sums = states + 4 * (STEPS + 1) * floats
        for job in range(worker, batch * tiles, workers):
            tile, n = job % tiles, job // tiles
            first = tile * TILE
            width = min(TILE, row - first)
            corner = 4 * (n * n_modes * row + first)
            _copy_tile(a + 4 * first, a_tile, n_modes, row, width, True)
            _copy_tile(g + corner, g_tile, n_modes, row, width, True)
            for i in range(n_modes):
                store(da_tile, i * TILE, _LONG, zeros(_LONG))
            for block in range(n_blocks - 1, -1, -1):
                t0, t1 = block * STEPS, min(length, (block + 1) * STEPS)
                place = kept + 4 * ((n * n_blocks + block) * n_modes * row + first)
                _copy_tile(place, states, n_modes, row, width, True)
                for t in range(t0, t1):
                    time, to = n * length + t, (tile * batch + n) * length + t
                    at, of_tile = 4 * (time * row + first), 4 * (t - t0) * floats
                    _again(
                        dy + at, x + at, step + at, b + 4 * time * n_modes, a_tile, states + of_tile,
                        transitions + of_tile, sums, n_modes, width,
                    )  # fmt: skip
                    _add_up(sums, dc + 4 * to * n_modes, n_modes)
                for t in range(t1 - 1, t0 - 1, -1):
                    time, to = n * length + t, (tile * batch + n) * length + t
                    at, of_tile, of_modes = 4 * (time * row + first), 4 * (t - t0) * floats, 4 * time * n_modes
                    for tensor in (dy, x, step):  # for the block that comes next
                        _fetch(tensor + at, -STEPS * row)
                    _step_back(
                        dy + at, x + at, step + at, b + of_modes, c + of_modes, a_tile, states + of_tile,
                        transitions + of_tile, g_tile, da_tile, dx + at, dstep + at, sums, n_modes, width,
                    )  # fmt: skip
                    _add_up(sums, db + 4 * to * n_modes, n_modes)
            _copy_tile(g_tile, g + corner, n_modes, row, width, False)
            _copy_tile(da_tile, da + corner, n_modes, row, width, False)
