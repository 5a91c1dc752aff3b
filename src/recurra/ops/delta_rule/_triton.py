"""The gated delta rule on a GPU, in Triton, step by step: one kernel forward, one for all gradients.

The formulas are those of `_cpu.py`. A program walks over time with a tile of columns of one head's state in registers:
every key channel, so what a key reads is a sum within the program. Value channels do not depend on each other, so the
columns are divided among programs. The reads of the next steps are already in flight (`num_stages`).

The forward kernel keeps u and the state before every `every`th step. The backward kernel takes the chunks from last to
first: it computes a chunk's states again into scratch memory, (programs, every, d_qk, columns), and reads them in
reverse. Its threads wait for each other in between, for a thread may read what another wrote. The gradients of q, k, a
and b are sums over columns, which are written tile by tile (the caller adds the tiles).

Nothing is divided, so decays of 0 are exact; what pads a tile stays 0, for 0 times infinity is NaN. This is the
recurrence and not its form in chunks (`_triton_chunk.py`): it has few launches, but steps follow each other, and shares
of gradients take memory. Tested in Triton's interpreter, compiled, never timed on a card.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops._toolkit.triton import on_device_of

_TILE = 1024  # numbers of the state in a program of one warp
_STAGES = 3


def _columns(d_qk: int, d_v: int) -> int:
    return min(_TILE // triton.next_power_of_2(d_qk), triton.next_power_of_2(d_v), 32)


def n_tiles(d_qk: int, d_v: int) -> int:
    """Return the number of tiles that the columns of a state are divided into."""
    return triton.cdiv(d_v, _columns(d_qk, d_v))


@triton.jit
def _place(heads, d_qk, d_v, DK: tl.constexpr, DV: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return this program's head of a sequence, both, and its tile, channels and their places in (d_qk, d_v)."""
    program = tl.program_id(0).to(tl.int64)  # 64 bits, because offsets follow from it
    tiles = tl.cdiv(d_v, DV)
    job, tile = program // tiles, program % tiles
    d, e = tl.arange(0, DK), tile * DV + tl.arange(0, DV)
    mask = (d < d_qk)[:, None] & (e < d_v)[None, :]
    return job, job // heads, job % heads, tile, d, e, d[:, None] * d_v + e[None, :], mask


@triton.jit
def _decays(a, step, d, d_qk, PER_CHANNEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a step's decay, (d_qk, 1) if there is one for each key channel."""
    if PER_CHANNEL:
        a_t = tl.load(a + step * d_qk + d, mask=d < d_qk, other=0.0)[:, None]
    else:
        a_t = tl.load(a + step)
    return a_t


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, a, b, state, last, y, u, kept, length, heads, d_qk, d_v, chunks,
    KEEP: tl.constexpr, PER_CHANNEL: tl.constexpr, EVERY: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Fill y and u (B, L, H, d_v), the last state (B, H, d_qk, d_v) and kept (B, H, chunks, d_qk, d_v)."""
    job, sequence, head, _, d, e, at, mask = _place(heads, d_qk, d_v, DK, DV)
    h = tl.load(state + job * d_qk * d_v + at, mask=mask, other=0.0)
    for chunk in range(chunks):
        if KEEP:
            tl.store(kept + (job * chunks + chunk) * d_qk * d_v + at, h, mask=mask)
        for t in tl.range(chunk * EVERY, tl.minimum(length, (chunk + 1) * EVERY), num_stages=STAGES):
            step = (sequence * length + t) * heads + head
            q_t = tl.load(q + step * d_qk + d, mask=d < d_qk, other=0.0)
            k_t = tl.load(k + step * d_qk + d, mask=d < d_qk, other=0.0)
            v_t = tl.load(v + step * d_v + e, mask=e < d_v, other=0.0)
            b_t = tl.load(b + step)
            h = _decays(a, step, d, d_qk, PER_CHANNEL) * h
            u_t = v_t - tl.sum(k_t[:, None] * h, 0)
            h = tl.where(mask, h + k_t[:, None] * (b_t * u_t)[None, :], 0.0)
            tl.store(y + step * d_v + e, tl.sum(q_t[:, None] * h, 0), mask=e < d_v)
            if KEEP:
                tl.store(u + step * d_v + e, u_t, mask=e < d_v)
    tl.store(last + job * d_qk * d_v + at, h, mask=mask)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    dy, dlast, q, k, a, b, u, kept, dq, dk, dv, da, db, dstate, states, length, heads, d_qk, d_v, chunks, steps,
    PER_CHANNEL: tl.constexpr, EVERY: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fill dv, dstate, and dq, dk, da and db (tiles, B, L, H, ...); `steps` is B L H."""
    job, sequence, head, tile, d, e, at, mask = _place(heads, d_qk, d_v, DK, DV)
    g = tl.load(dlast + job * d_qk * d_v + at, mask=mask, other=0.0)
    states += tl.program_id(0).to(tl.int64) * EVERY * DK * DV
    states_at = states + d[:, None] * DV + tl.arange(0, DV)[None, :]
    for i in range(chunks):
        first = (chunks - 1 - i) * EVERY
        stop = tl.minimum(length, first + EVERY)
        h = tl.load(kept + (job * chunks + chunks - 1 - i) * d_qk * d_v + at, mask=mask, other=0.0)
        for t in tl.range(first, stop, num_stages=STAGES):
            tl.store(states_at + (t - first) * DK * DV, h)
            step = (sequence * length + t) * heads + head
            k_t = tl.load(k + step * d_qk + d, mask=d < d_qk, other=0.0)
            u_t = tl.load(u + step * d_v + e, mask=e < d_v, other=0.0)
            w_t = tl.load(b + step) * u_t
            h = tl.where(mask, _decays(a, step, d, d_qk, PER_CHANNEL) * h + k_t[:, None] * w_t[None, :], 0.0)
        tl.debug_barrier()  # the states of the chunk are written
        for j in tl.range(0, stop - first, num_stages=STAGES):
            t = stop - 1 - j
            step = (sequence * length + t) * heads + head
            before = tl.load(states_at + (t - first) * DK * DV)
            q_t = tl.load(q + step * d_qk + d, mask=d < d_qk, other=0.0)
            k_t = tl.load(k + step * d_qk + d, mask=d < d_qk, other=0.0)
            u_t = tl.load(u + step * d_v + e, mask=e < d_v, other=0.0)
            dy_t = tl.load(dy + step * d_v + e, mask=e < d_v, other=0.0)
            a_t, b_t = _decays(a, step, d, d_qk, PER_CHANNEL), tl.load(b + step)
            share = tile * steps + step
            tl.store(dq + share * d_qk + d, tl.sum(dy_t[None, :] * h, 1), mask=d < d_qk)
            g = tl.where(mask, g + q_t[:, None] * dy_t[None, :], 0.0)
            dw_t = tl.sum(k_t[:, None] * g, 0)
            dv_t = b_t * dw_t
            tl.store(dv + step * d_v + e, dv_t, mask=e < d_v)
            tl.store(db + share, tl.sum(dw_t * u_t, 0))
            dk_t = tl.sum(g * (b_t * u_t)[None, :] - a_t * before * dv_t[None, :], 1)
            tl.store(dk + share * d_qk + d, dk_t, mask=d < d_qk)
            g = tl.where(mask, g - k_t[:, None] * dv_t[None, :], 0.0)
            da_t = tl.sum(g * before, 1)
            if PER_CHANNEL:
                tl.store(da + share * d_qk + d, da_t, mask=d < d_qk)
            else:
                tl.store(da + share, tl.sum(da_t, 0))
            g *= a_t
            h = before
        tl.debug_barrier()  # and read
    tl.store(dstate + job * d_qk * d_v + at, g, mask=mask)


def _launch(q: Tensor, v: Tensor, a: Tensor, every: int) -> tuple[int, tuple[int, ...], dict[str, int]]:
    """Return the number of programs, the sizes, and the kernels' constants."""
    batch, length, heads, d_qk = q.shape
    d_v = v.shape[3]
    tile = {"EVERY": every, "DK": triton.next_power_of_2(d_qk), "DV": _columns(d_qk, d_v), "STAGES": _STAGES}
    sizes = length, heads, d_qk, d_v, triton.cdiv(length, every)
    options = {"PER_CHANNEL": a.shape[3] > 1, **tile, "num_warps": 1}
    return batch * heads * n_tiles(d_qk, d_v), sizes, options


def forward_into(
    y: Tensor, last: Tensor, u: Tensor, kept: Tensor, every: int,
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
) -> None:  # fmt: skip
    """Fill y, the last state, and u and kept if they are not empty; all are contiguous."""
    programs, sizes, options = _launch(q, v, a, every)
    with on_device_of(q):
        _forward[(programs,)](q, k, v, a, b, state, last, y, u, kept, *sizes, KEEP=kept.numel() > 0, **options)


def backward_into(
    gradients: tuple[Tensor, ...], every: int,
    dy: Tensor, dlast: Tensor, q: Tensor, k: Tensor, a: Tensor, b: Tensor, u: Tensor, kept: Tensor,
) -> None:  # fmt: skip
    """Fill dq, dk, dv, da, db and dstate; all are contiguous."""
    dq, dk, dv, da, db, dstate = gradients
    programs, sizes, options = _launch(q, u, a, every)
    tiles = n_tiles(q.shape[3], u.shape[3])
    shares = [x.new_empty(tiles, *x.shape) for x in (dq, dk, da, db)]
    states = q.new_empty(programs * every * options["DK"] * options["DV"])
    with on_device_of(q):
        _backward[(programs,)](
            dy, dlast, q, k, a, b, u, kept, *shares[:2], dv, *shares[2:], dstate, states, *sizes, b.numel(), **options
        )  # fmt: skip
    for share, gradient in zip(shares, (dq, dk, da, db)):
        torch.sum(share, 0, out=gradient)
