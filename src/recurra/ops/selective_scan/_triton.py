"""The selective scan on a GPU, in Triton: one kernel forward, one for all gradients, with the formulas of `_cpu.py`.

A program walks over time with a tile of neighbouring channels of one sequence. The states of all their modes are in
registers, (modes, channels), so sums over modes stay within a program. The reads of the next steps are already in
flight (`num_stages`). A step is a loop iteration: no products of transitions are formed, and an infinity or NaN
spreads as in the recurrence; what pads a tile stays 0, for 0 times infinity is NaN.

The forward kernel keeps the state before every `STEPS`th step. The backward kernel takes the chunks from last to
first: it computes a chunk's states again into scratch memory, (programs, STEPS, modes, channels), and reads them in
reverse. Its threads wait for each other in between, for a thread may read what another wrote. Sums over channels are
written tile by tile (the caller adds the tiles).

States and all arithmetic have the type of h0, float32 or float64; x, step, b, c and y can be bfloat16. Time is not cut
into parallel chunks: few sequences with few channels do not fill a card. Tested in Triton's interpreter, compiled,
never timed on a card.
"""

import triton
import triton.language as tl
from torch import Tensor

from recurra.ops._toolkit.triton import on_device_of

STEPS = 16  # between kept states, which then take as much memory as x with 16 modes
TILE = 32  # channels of a program: with 16 modes, one warp has 16 numbers of each (modes, channels) a thread
_STAGES = 3


@triton.jit
def _place(row, n_modes, MODES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return this program's sequence and tile, its channels and modes, and where they lie in (modes, row)."""
    program = tl.program_id(0).to(tl.int64)  # 64 bits, because offsets follow from it
    tiles = tl.cdiv(row, BLOCK)
    d, n = program % tiles * BLOCK + tl.arange(0, BLOCK), tl.arange(0, MODES)
    mask = (n < n_modes)[:, None] & (d < row)[None, :]
    return program // tiles, program % tiles, d, n, n[:, None] * row + d[None, :], mask


@triton.jit
def _inputs(x, step, b, time, d, row, n, n_modes, NUMBER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read x and the step sizes (channels), and b (modes), of one step."""
    x_t = tl.load(x + time * row + d, mask=d < row, other=0.0).to(NUMBER)
    s_t = tl.load(step + time * row + d, mask=d < row, other=0.0).to(NUMBER)
    return x_t, s_t, tl.load(b + time * n_modes + n, mask=n < n_modes, other=0.0).to(NUMBER)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, step, a, b, c, h, y, kept, length, row, n_modes, chunks,
    KEEP: tl.constexpr, EVERY: tl.constexpr, MODES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fill y (B, L, D) and kept (B, chunks, N, D), and turn h (B, N, D) from the first state into the last."""
    NUMBER: tl.constexpr = h.dtype.element_ty
    sequence, _, d, n, at, mask = _place(row, n_modes, MODES, BLOCK)
    a_t, h_t = tl.load(a + at, mask=mask, other=0.0), tl.load(h + sequence * n_modes * row + at, mask=mask, other=0.0)
    for chunk in range(chunks):
        if KEEP:
            tl.store(kept + (sequence * chunks + chunk) * n_modes * row + at, h_t, mask=mask)
        for t in tl.range(chunk * EVERY, tl.minimum(length, (chunk + 1) * EVERY), num_stages=STAGES):
            time = sequence * length + t
            x_t, s_t, b_t = _inputs(x, step, b, time, d, row, n, n_modes, NUMBER)
            c_t = tl.load(c + time * n_modes + n, mask=n < n_modes, other=0.0).to(NUMBER)
            h_t = tl.where(mask, tl.exp(s_t[None, :] * a_t) * h_t + b_t[:, None] * (s_t * x_t)[None, :], 0.0)
            y_t = tl.sum(c_t[:, None] * h_t, 0)
            tl.store(y + time * row + d, y_t.to(y.dtype.element_ty), mask=d < row)
    tl.store(h + sequence * n_modes * row + at, h_t, mask=mask)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    dy, x, step, a, b, c, kept, g, dx, dstep, da, db, dc, states, length, row, n_modes, chunks, batch,
    EVERY: tl.constexpr, MODES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fill dx, dstep, da (B, N, D), db and dc (tiles, B, L, N); g (B, N, D) from the last state's gradient to h0's."""
    NUMBER: tl.constexpr = g.dtype.element_ty
    INPUT: tl.constexpr = dx.dtype.element_ty
    sequence, tile, d, n, at, mask = _place(row, n_modes, MODES, BLOCK)
    corner = sequence * n_modes * row + at
    a_t, g_t = tl.load(a + at, mask=mask, other=0.0), tl.load(g + corner, mask=mask, other=0.0)
    da_t = tl.zeros([MODES, BLOCK], NUMBER)
    states += tl.program_id(0).to(tl.int64) * EVERY * MODES * BLOCK
    states_at = states + n[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for i in range(chunks):
        first = (chunks - 1 - i) * EVERY
        stop = tl.minimum(length, first + EVERY)
        h_t = tl.load(kept + (sequence * chunks + chunks - 1 - i) * n_modes * row + at, mask=mask, other=0.0)
        for t in tl.range(first, stop, num_stages=STAGES):
            tl.store(states_at + (t - first) * MODES * BLOCK, h_t)
            x_t, s_t, b_t = _inputs(x, step, b, sequence * length + t, d, row, n, n_modes, NUMBER)
            h_t = tl.where(mask, tl.exp(s_t[None, :] * a_t) * h_t + b_t[:, None] * (s_t * x_t)[None, :], 0.0)
        tl.debug_barrier()  # the states of the chunk are written
        for j in tl.range(0, stop - first, num_stages=STAGES):
            t = stop - 1 - j
            time = sequence * length + t
            before = tl.load(states_at + (t - first) * MODES * BLOCK)
            x_t, s_t, b_t = _inputs(x, step, b, time, d, row, n, n_modes, NUMBER)
            c_t = tl.load(c + time * n_modes + n, mask=n < n_modes, other=0.0).to(NUMBER)
            dy_t = tl.load(dy + time * row + d, mask=d < row, other=0.0).to(NUMBER)
            g_t = tl.where(mask, g_t + c_t[:, None] * dy_t[None, :], 0.0)
            to = (tile * batch * length + time) * n_modes + n
            tl.store(dc + to, tl.sum(dy_t[None, :] * h_t, 1), mask=n < n_modes)
            tl.store(db + to, tl.sum(g_t * (s_t * x_t)[None, :], 1), mask=n < n_modes)
            w_t = tl.sum(g_t * b_t[:, None], 0)
            g_t *= tl.exp(s_t[None, :] * a_t)
            u_t = g_t * before
            da_t += u_t * s_t[None, :]
            tl.store(dx + time * row + d, (w_t * s_t).to(INPUT), mask=d < row)
            tl.store(dstep + time * row + d, (w_t * x_t + tl.sum(u_t * a_t, 0)).to(INPUT), mask=d < row)
            h_t = before
        tl.debug_barrier()  # and read
    tl.store(g + corner, g_t, mask=mask)
    tl.store(da + corner, da_t, mask=mask)


def _launch(x: Tensor, n_modes: int) -> tuple[int, int, dict[str, int]]:
    """Return the numbers of programs and of chunks, and the kernels' constants."""
    modes = triton.next_power_of_2(n_modes)
    options = {"EVERY": STEPS, "MODES": modes, "BLOCK": TILE, "STAGES": _STAGES, "num_warps": max(1, modes // 16)}
    return x.shape[0] * triton.cdiv(x.shape[2], TILE), triton.cdiv(x.shape[1], STEPS), options


def forward_into(
    y: Tensor, h: Tensor, kept: Tensor | None, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> None:
    """Fill y and kept, and turn h from the first state into the last; a is (N, D), and all are contiguous."""
    programs, chunks, options = _launch(x, len(a))
    with on_device_of(x):
        _forward[(programs,)](
            x, step, a, b, c, h, y, h if kept is None else kept, *x.shape[1:], len(a), chunks, KEEP=kept is not None,
            **options,
        )  # fmt: skip


def backward_into(
    g: Tensor, dx: Tensor, dstep: Tensor, da: Tensor, db: Tensor, dc: Tensor,
    dy: Tensor, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, kept: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients, those of a by sequence and of b and c by tile, and turn g into that of the first state."""
    programs, chunks, options = _launch(x, len(a))
    states = g.new_empty(programs * STEPS * options["MODES"] * TILE)
    with on_device_of(x):
        _backward[(programs,)](
            dy, x, step, a, b, c, kept, g, dx, dstep, da, db, dc, states, *x.shape[1:], len(a), chunks, len(x),
            **options,
        )  # fmt: skip
