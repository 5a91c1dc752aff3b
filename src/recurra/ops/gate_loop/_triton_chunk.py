"""GateLoop in chunks on a GPU, in Triton: what all these kernels share, and the forward pass.

    S_t = a_t S_{t-1} + k_t^T v_t;  y_t = q_t S_t          S (d_qk, d_v), a_t one per head or one per key channel

Time is cut into chunks of `span` steps, and chunks into blocks of T. One launch computes what each chunk adds to the
state, the linear scan over chunks gives the states that enter them, and a second launch walks through all chunks side
by side, block by block: attention inside the block and, between blocks, the state in registers,

    Y = (D * Q K^T) V + (Q up) S,   S <- whole S + (K after)^T V

with up_i = a_1 ... a_i, after_j = a_{j+1} ... a_T, whole = a_1 ... a_T and D_ij = a_{j+1} ... a_i for i >= j. All of
them are computed by multiplication, without logarithms or reciprocals, so transitions of 0, of 1e-6, above 1, negative
and complex are as exact here as in the recurrence. With a transition per key channel, D differs between channels, and
the scores are summed column by column.

Complex numbers are interleaved, and everything is complex if the transitions are (C); q, k and v can be real all the
same (not X). A kernel holds planes (re, im) in registers; for real numbers, im is a copy that the compiler drops.
Products are matrix products with float32 sums; see `Layout` for their precision. Nothing here checks its tensors: the
operators do (`recurra.ops.gate_loop._heads`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops._toolkit.triton import ChunkTiles, floats, multiply, on_device_of, tiles_for
from recurra.ops.scan._triton import entering_states


class _Layout(NamedTuple):
    """The sizes of a call, and how it is laid out."""

    batch: int
    length: int
    heads: int
    d_qk: int
    d_v: int
    is_scalar: bool
    is_complex: bool
    has_complex_inputs: bool
    number: torch.dtype
    work: ChunkTiles

    @property
    def span(self) -> int:
        """Steps per chunk, a multiple of those per block."""
        tiles = self.work
        return min(tiles.span, -(-self.length // tiles.block) * tiles.block)

    @property
    def chunks(self) -> int:
        """The number of chunks that covers all steps."""
        return -(-self.length // self.span)

    @property
    def sizes(self) -> tuple[int, ...]:
        """What every kernel takes after the strides; the number of chunks follows."""
        return self.length, self.heads, self.d_qk, self.d_v

    def options(self, tiled: str) -> dict[str, int | bool | str]:
        """Return a kernel's constants: its tiles are columns ("v") or rows ("qk") of the state."""
        blocks = {"qk": _padded(self.d_qk), "v": _padded(self.d_v)}
        blocks[tiled] = self._tile(tiled)
        warps = self.work.warps if tiled == "v" else self.work.key_warps
        precision = {torch.bfloat16: "tf32", torch.float64: "ieee"}.get(self.number, "tf32x3")
        return {
            "SPAN": self.span, "T": self.work.block, "DK": blocks["qk"], "DV": blocks["v"], "SCALAR": self.is_scalar,
            "C": self.is_complex, "X": self.has_complex_inputs, "PRECISION": precision, "num_warps": warps,
        }  # fmt: skip

    def tiles(self, tiled: str) -> int:
        """Count the tiles that cover all rows or columns."""
        return triton.cdiv(self.d_v if tiled == "v" else self.d_qk, self._tile(tiled))

    def grid(self, chunks: int, tiled: str) -> tuple[int]:
        """Count the programs, one for each sequence, head, chunk and tile, in the order of `place`."""
        return (self.batch * self.heads * chunks * self.tiles(tiled),)

    def _tile(self, tiled: str) -> int:
        if tiled == "v":
            return min(_padded(self.d_v), self.work.tile)
        return min(_padded(self.d_qk), self.work.key_tile)


def _padded(channels: int) -> int:
    """Return the size of a block of this many channels; matrix products need at least 16."""
    return max(16, triton.next_power_of_2(channels))


def layout(q: Tensor, v: Tensor, a: Tensor) -> _Layout:
    """Lay out a call for q (B, L, H, d_qk), v (B, L, H, d_v) and a."""
    batch, length, heads, d_qk = q.shape
    number = q.dtype.to_real() if q.is_complex() else q.dtype
    return _Layout(
        batch, length, heads, d_qk, v.shape[-1], a.shape[-1] == 1, a.is_complex(), q.is_complex(), number,
        tiles_for("chunk", number, a.is_complex(), q.device),
    )  # fmt: skip


@triton.jit
def place(heads, chunks, tiles):  # type: ignore[no-untyped-def]
    """Return this program's sequence, head, chunk and tile, in 64 bits because offsets follow from them."""
    program = tl.program_id(0).to(tl.int64)
    tile = program % tiles
    chunk = program // tiles % chunks
    head = program // tiles // chunks
    return head // heads, head % heads, chunk, tile


@triton.jit
def load(  # type: ignore[no-untyped-def]
    x, time, length, stride, d, channels, padding, C: tl.constexpr, CONJ: tl.constexpr, NUMBER: tl.constexpr
):
    """Read steps `time` of channels d, (times, ds), or their conjugates; outside is `padding`."""
    WIDTH: tl.constexpr = 2 if C else 1
    mask = (time < length)[:, None] & (d < channels)[None, :]
    at = x + time.to(tl.int64)[:, None] * stride + WIDTH * d[None, :]
    re = tl.load(at, mask=mask, other=padding).to(NUMBER)
    im = re
    if C:
        im = tl.load(at + 1, mask=mask, other=0.0).to(NUMBER)
        if CONJ:
            im = -im
    return re, im


@triton.jit
def store(x, time, length, stride, d, channels, re, im, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write what `load` reads."""
    WIDTH: tl.constexpr = 2 if C else 1
    mask = (time < length)[:, None] & (d < channels)[None, :]
    at = x + time.to(tl.int64)[:, None] * stride + WIDTH * d[None, :]
    tl.store(at, re.to(x.dtype.element_ty), mask=mask)
    if C:
        tl.store(at + 1, im.to(x.dtype.element_ty), mask=mask)


@triton.jit
def times(x_re, x_im, y_re, y_im, X: tl.constexpr, Y: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute x y element by element; X and Y say which of them are complex."""
    if X and Y:
        re, im = multiply(x_re, x_im, y_re, y_im, True)
    else:
        re = x_re * y_re
        im = re
        if X:
            im = x_im * y_re
        if Y:
            im = x_re * y_im
    return re, im


@triton.jit
def dot(x_re, x_im, y_re, y_im, X: tl.constexpr, Y: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the matrix product x y; X and Y say which of them are complex."""
    re = tl.dot(x_re, y_re, input_precision=PRECISION)
    im = re
    if X and Y:
        re -= tl.dot(x_im, y_im, input_precision=PRECISION)
        im = tl.dot(x_re, y_im, input_precision=PRECISION) + tl.dot(x_im, y_re, input_precision=PRECISION)
    elif X:
        im = tl.dot(x_im, y_re, input_precision=PRECISION)
    elif Y:
        im = tl.dot(x_re, y_im, input_precision=PRECISION)
    return re, im


@triton.jit
def multiply_where(condition, x_re, x_im, a_re, a_im, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return x a where the condition holds, else x."""
    re, im = multiply(x_re, x_im, a_re, a_im, C)
    return tl.where(condition, re, x_re), tl.where(condition, im, x_im)


@triton.jit
def block_products(  # type: ignore[no-untyped-def]
    a, start, length, stride, d, channels, C: tl.constexpr, CONJ: tl.constexpr, T: tl.constexpr, NUMBER: tl.constexpr
):
    """Compute up and after (T, ds) and whole (1, ds) of the block at `start`, transition by transition."""
    i = tl.arange(0, T)[:, None]
    one = tl.arange(0, 1)
    row, _ = load(a, start + one, length, stride, d, channels, 1.0, C, CONJ, NUMBER)
    whole_re = tl.full(row.shape, 1.0, NUMBER)
    whole_im = tl.zeros(row.shape, NUMBER)
    up_re = (tl.zeros([T, 1], NUMBER) + 1.0) * whole_re
    up_im = tl.zeros([T, 1], NUMBER) * whole_re
    after_re, after_im = up_re, up_im
    for t in range(T):
        a_re, a_im = load(a, start + t + one, length, stride, d, channels, 1.0, C, CONJ, NUMBER)
        up_re, up_im = multiply_where(i >= t, up_re, up_im, a_re, a_im, C)
        after_re, after_im = multiply_where(i < t, after_re, after_im, a_re, a_im, C)
        whole_re, whole_im = multiply(whole_re, whole_im, a_re, a_im, C)
    return up_re, up_im, after_re, after_im, whole_re, whole_im


@triton.jit
def decays(  # type: ignore[no-untyped-def]
    a, start, length, stride, C: tl.constexpr, CONJ: tl.constexpr, T: tl.constexpr, NUMBER: tl.constexpr
):
    """Compute D (T, T) of the block at `start` for one transition per head: a_{j+1} ... a_i for i >= j, else 0."""
    i, j, one = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :], tl.arange(0, 1)
    re = tl.where(i >= j, 1.0, 0.0).to(NUMBER)
    im = tl.zeros([T, T], NUMBER)
    for t in range(T):
        a_re, a_im = load(a, start + t + one, length, stride, one, 1, 1.0, C, CONJ, NUMBER)
        re, im = multiply_where((i >= t) & (j < t), re, im, a_re, a_im, C)
    return re, im


@triton.jit
def scores(  # type: ignore[no-untyped-def]
    q_re, q_im, k, k_time, a, a_time, start, length, d, channels, SCALAR: tl.constexpr, C: tl.constexpr,
    X: tl.constexpr, CONJ: tl.constexpr, T: tl.constexpr, NUMBER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the scores (T, T) of the block at `start`: sum_d q_id k_jd a_{j+1,d} ... a_{i,d} for i >= j, else 0."""
    i, j, one = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :], tl.arange(0, 1)
    if SCALAR:
        k_re, k_im = load(k, start + tl.arange(0, T), length, k_time, d, channels, 0.0, X, CONJ, NUMBER)
        re, im = dot(q_re, q_im, tl.trans(k_re), tl.trans(k_im), X, X, PRECISION)
        d_re, d_im = decays(a, start, length, a_time, C, CONJ, T, NUMBER)
        re, im = times(re, im, d_re, d_im, X, C)
    else:
        re, im = tl.zeros([T, T], NUMBER), tl.zeros([T, T], NUMBER)
        # q_i a_{j+1} ... a_i for i >= j, from the last column to the first
        x_re, x_im = tl.zeros(q_re.shape, NUMBER), tl.zeros(q_re.shape, NUMBER)
        for n in range(T):
            t = T - 1 - n
            k_re, k_im = load(k, start + t + one, length, k_time, d, channels, 0.0, X, CONJ, NUMBER)
            a_re, a_im = load(a, start + t + 1 + one, length, a_time, d, channels, 1.0, C, CONJ, NUMBER)
            x_re, x_im = multiply(x_re, x_im, a_re, a_im, C)
            x_re = tl.where(i == t, q_re, x_re)
            if X:
                x_im = tl.where(i == t, q_im, x_im)
            elif C:
                x_im = tl.where(i == t, 0.0, x_im)
            s_re, s_im = times(x_re, x_im, k_re, k_im, C, X)
            re = tl.where(j == t, tl.sum(s_re, 1, keep_dims=True), re)
            im = tl.where(j == t, tl.sum(s_im, 1, keep_dims=True), im)
    return re, im


@triton.jit
def _summarise(  # type: ignore[no-untyped-def]
    u, w, a, products, added, u_batch, u_time, u_head, w_batch, w_time, w_head, a_batch, a_time, a_head,
    length, heads, d_qk, d_v, chunks, IS_BACKWARD: tl.constexpr, SPAN: tl.constexpr, T: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, SCALAR: tl.constexpr, C: tl.constexpr, X: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill products (B H, d_a, chunks) and added (B H, d_qk, chunks, d_v): a chunk turns S into products S + added."""
    NUMBER: tl.constexpr = added.dtype.element_ty
    WIDTH: tl.constexpr = 2 if C else 1
    W_COMPLEX: tl.constexpr = C if IS_BACKWARD else X
    G: tl.constexpr = 1 if SCALAR else DK
    batch, head, chunk, tile = place(heads, chunks, tl.cdiv(d_v, DV))
    d, e, g, channels = tl.arange(0, DK), tile * DV + tl.arange(0, DV), tl.arange(0, G), d_qk
    if SCALAR:
        channels = 1
    u += batch * u_batch + head * u_head
    w += batch * w_batch + head * w_head
    a += batch * a_batch + head * a_head
    start = chunk * SPAN
    if IS_BACKWARD:
        start = (tl.cdiv(length, SPAN) - 1 - chunk) * SPAN
    x_re, x_im = tl.zeros([DK, DV], NUMBER), tl.zeros([DK, DV], NUMBER)
    p_re, p_im = tl.full([1, G], 1.0, NUMBER), tl.zeros([1, G], NUMBER)
    for block in range(0, SPAN, T):
        first = start + block
        if IS_BACKWARD:
            first = start + SPAN - T - block
        time = first + tl.arange(0, T)
        u_re, u_im = load(u, time, length, u_time, d, d_qk, 0.0, X, IS_BACKWARD, NUMBER)
        w_re, w_im = load(w, time, length, w_time, e, d_v, 0.0, W_COMPLEX, False, NUMBER)
        up_re, up_im, after_re, after_im, whole_re, whole_im = block_products(
            a, first, length, a_time, g, channels, C, IS_BACKWARD, T, NUMBER
        )
        if IS_BACKWARD:
            u_re, u_im = times(u_re, u_im, up_re, up_im, X, C)
        else:
            u_re, u_im = times(u_re, u_im, after_re, after_im, X, C)
        x_re, x_im = multiply(x_re, x_im, tl.trans(whole_re), tl.trans(whole_im), C)
        new_re, new_im = dot(tl.trans(u_re), tl.trans(u_im), w_re, w_im, C, W_COMPLEX, PRECISION)
        x_re, x_im = x_re + new_re, x_im + new_im
        p_re, p_im = multiply(p_re, p_im, whole_re, whole_im, C)
    sequence = batch * heads + head
    added += WIDTH * (sequence * d_qk * chunks + chunk) * d_v
    store(added, d, d_qk, WIDTH * chunks * d_v, e, d_v, x_re, x_im, C)
    products += WIDTH * (sequence * channels * chunks + chunk)
    rows = tl.where(tile == 0, channels, 0)  # one tile writes them
    store(products, g, rows, WIDTH * chunks, tl.arange(0, 1), 1, tl.trans(p_re), tl.trans(p_im), C)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, a, entering, y, last, q_batch, q_time, q_head, k_batch, k_time, k_head,
    v_batch, v_time, v_head, a_batch, a_time, a_head, length, heads, d_qk, d_v, chunks,
    SPAN: tl.constexpr, T: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SCALAR: tl.constexpr, C: tl.constexpr,
    X: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill y (B, L, H, d_v) and the last state (B H, d_qk, d_v); entering (B H, d_qk, chunks, d_v)."""
    NUMBER: tl.constexpr = last.dtype.element_ty
    WIDTH: tl.constexpr = 2 if C else 1
    G: tl.constexpr = 1 if SCALAR else DK
    batch, head, chunk, tile = place(heads, chunks, tl.cdiv(d_v, DV))
    d, e, g, channels = tl.arange(0, DK), tile * DV + tl.arange(0, DV), tl.arange(0, G), d_qk
    if SCALAR:
        channels = 1
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    a += batch * a_batch + head * a_head
    y += WIDTH * (batch * length * heads + head) * d_v
    sequence = batch * heads + head
    entering += WIDTH * (sequence * d_qk * chunks + chunk) * d_v
    x_re, x_im = load(entering, d, d_qk, WIDTH * chunks * d_v, e, d_v, 0.0, C, False, NUMBER)
    for block in range(0, SPAN, T):
        start = chunk * SPAN + block
        time = start + tl.arange(0, T)
        q_re, q_im = load(q, time, length, q_time, d, d_qk, 0.0, X, False, NUMBER)
        k_re, k_im = load(k, time, length, k_time, d, d_qk, 0.0, X, False, NUMBER)
        v_re, v_im = load(v, time, length, v_time, e, d_v, 0.0, X, False, NUMBER)
        up_re, up_im, after_re, after_im, whole_re, whole_im = block_products(
            a, start, length, a_time, g, channels, C, False, T, NUMBER
        )
        s_re, s_im = scores(
            q_re, q_im, k, k_time, a, a_time, start, length, d, d_qk, SCALAR, C, X, False, T, NUMBER, PRECISION
        )
        near_re, near_im = dot(s_re, s_im, v_re, v_im, C, X, PRECISION)
        q_re, q_im = times(q_re, q_im, up_re, up_im, X, C)
        far_re, far_im = dot(q_re, q_im, x_re, x_im, C, C, PRECISION)
        store(y, time, length, WIDTH * heads * d_v, e, d_v, near_re + far_re, near_im + far_im, C)
        k_re, k_im = times(k_re, k_im, after_re, after_im, X, C)
        x_re, x_im = multiply(x_re, x_im, tl.trans(whole_re), tl.trans(whole_im), C)
        new_re, new_im = dot(tl.trans(k_re), tl.trans(k_im), v_re, v_im, C, X, PRECISION)
        x_re, x_im = x_re + new_re, x_im + new_im
    last += WIDTH * sequence * d_qk * d_v
    store(last, d, tl.where(chunk == chunks - 1, d_qk, 0), WIDTH * d_v, e, d_v, x_re, x_im, C)


def strides(*tensors: Tensor) -> list[int]:
    """Collect batch, time and head strides of (B, L, H, d) tensors, in floats."""
    return [n for tensor in tensors for n in floats(tensor).stride()[:3]]


def states_between(u: Tensor, w: Tensor, a: Tensor, x: Tensor, laid_out: _Layout, is_backward: bool) -> Tensor:
    """Return the states (B H, d_qk, chunks, d_v) that enter the chunks, or backwards the gradients at their ends.

    u, w are k, v and x the first state (B, H, d_qk, d_v); or q, dy and the gradient of the last state.
    """
    chunks, rows, (d_qk, d_v) = laid_out.chunks - 1, x.shape[0] * x.shape[1], x.shape[2:]
    products = torch.empty((rows, a.shape[-1], chunks), dtype=x.dtype, device=x.device)
    added = torch.empty((rows, d_qk, chunks, d_v), dtype=x.dtype, device=x.device)
    if chunks:
        _summarise[laid_out.grid(chunks, "v")](
            *map(floats, (u, w, a, products, added)), *strides(u, w, a), *laid_out.sizes, chunks,
            IS_BACKWARD=is_backward, **laid_out.options("v"),
        )  # fmt: skip
    gates = products.expand(rows, d_qk, chunks).reshape(rows * d_qk, chunks, 1).expand(-1, -1, d_v)
    states = entering_states(gates, added.flatten(0, 1), x.reshape(rows * d_qk, d_v))
    return states.view(rows, d_qk, chunks + 1, d_v)


def forward_into(y: Tensor, last: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> None:
    """Fill y and the last state, contiguous; the others have their channels next to each other."""
    laid_out = layout(q, v, a)
    with on_device_of(q):
        entering = states_between(k, v, a, state, laid_out, is_backward=False)
        _forward[laid_out.grid(laid_out.chunks, "v")](
            *map(floats, (q, k, v, a, entering, y, last)), *strides(q, k, v, a), *laid_out.sizes, laid_out.chunks,
            **laid_out.options("v"),
        )  # fmt: skip
