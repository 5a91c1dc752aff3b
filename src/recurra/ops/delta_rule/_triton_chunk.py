"""The gated delta rule on a GPU in chunks, in Triton: the WY form, by matrix products.

Step i learns w_i = b_i u_i with u_i = v_i - k_i a_i h_{i-1}. Once all w are known, the rule is linear attention with
values w, which GateLoop's kernels compute, and so are its gradients once dv is known, too: each step is then two of
linear attention. The first decays and is read by k, which gives v - u and sends -dv back; the second writes k^T w and
is read by q. What is left are u and dv. In a chunk of T steps, with the decays up_i = a_1 ... a_i, whole = a_1 ... a_T,
after_i = a_{i+1} ... a_T and A_ij = k_i (a_{j+1} ... a_i) k_j^T below the diagonal and 0 elsewhere,

    N = (I + A diag(b))^-1;   W = N (up k);   K = after k
    forward    u = N v - W h;           h <- whole h + K^T (b u)
    backward   x = b (e + K c);         dv = N^T x;                 c <- whole c - W^T x

where e are the gradients of w of linear attention alone, and c starts as 0. N, W and K of all chunks are computed side
by side, N row by row by forward substitution; a walk through the chunks, forward or back, takes three matrix products
for each. Decays are only multiplied, as in GateLoop's kernels, so those of 0 are exact. Nothing here checks its
tensors. Tested in Triton's interpreter, compiled, never timed on a card.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops._toolkit.triton import on_device_of
from recurra.ops.gate_loop import _triton_chunk as linear
from recurra.ops.gate_loop import _triton_chunk_backward as linear_backward
from recurra.ops.gate_loop._triton_chunk import block_products, load, place, scores, store

_T = 16  # steps in a chunk: matrix products take 16 or more, and forward substitution takes as many turns
_TILE = 2048  # numbers of the state in a program
_STAGES = 2


@triton.jit
def _read(x, time, length, stride, d, channels, NUMBER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read steps `time` of channels d, 0 outside."""
    re, _ = load(x, time, length, stride, d, channels, 0.0, False, False, NUMBER)
    return re


@triton.jit
def _write(x, time, length, stride, d, channels, y):  # type: ignore[no-untyped-def]
    store(x, time, length, stride, d, channels, y, y, False)


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    k, a, b, inverse, reads, writes, products, length, heads, d_qk, chunks,
    T: tl.constexpr, DK: tl.constexpr, SCALAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill N (B H chunks, T, T), W and K (B, L, H, d_qk), and the products of decays (B H chunks, d_a)."""
    NUMBER: tl.constexpr = inverse.dtype.element_ty
    G: tl.constexpr = 1 if SCALAR else DK
    batch, head, chunk, _ = place(heads, chunks, 1)
    i, j, d, g, channels = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :], tl.arange(0, DK), tl.arange(0, G), d_qk
    if SCALAR:
        channels = 1
    first, job = batch * length * heads + head, (batch * heads + head) * chunks + chunk
    start, k_time, a_time = chunk * T, heads * d_qk, heads * channels
    time = start + tl.arange(0, T)
    k += first * d_qk
    a += first * channels
    keys = _read(k, time, length, k_time, d, d_qk, NUMBER)
    b_j = _read(b + first, time, length, heads, tl.arange(0, 1), 1, NUMBER)
    up, _, after, _, whole, _ = block_products(a, start, length, a_time, g, channels, False, False, T, NUMBER)
    below, _ = scores(
        keys, keys, k, k_time, a, a_time, start, length, d, d_qk, SCALAR, False, False, False, T, NUMBER, PRECISION
    )
    below = tl.where(i > j, below * tl.trans(b_j), 0.0)
    n = tl.where(i == j, 1.0, 0.0).to(NUMBER)
    for t in range(1, T):
        row = tl.trans(tl.sum(tl.where(i == t, below, 0.0), 0, keep_dims=True))
        n = tl.where(i == t, n - tl.sum(row * n, 0, keep_dims=True), n)
    w = tl.dot(n, up * keys, input_precision=PRECISION)
    _write(inverse + job * T * T, tl.arange(0, T), T, T, tl.arange(0, T), T, n)
    _write(reads + first * d_qk, time, length, k_time, d, d_qk, w)
    _write(writes + first * d_qk, time, length, k_time, d, d_qk, after * keys)
    _write(products + job * channels, tl.arange(0, 1), 1, 0, g, channels, whole)


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    given, b, inverse, reads, writes, products, state, found, length, heads, d_qk, d_v, chunks,
    IS_BACKWARD: tl.constexpr, DV: tl.constexpr, STAGES: tl.constexpr, T: tl.constexpr, DK: tl.constexpr,
    SCALAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill u from v and the first state, or dv from e, chunk by chunk; both (B, L, H, d_v)."""
    NUMBER: tl.constexpr = inverse.dtype.element_ty
    G: tl.constexpr = 1 if SCALAR else DK
    batch, head, _, tile = place(heads, 1, tl.cdiv(d_v, DV))
    d, e, g, channels = tl.arange(0, DK), tile * DV + tl.arange(0, DV), tl.arange(0, G), d_qk
    if SCALAR:
        channels = 1
    first, job = batch * length * heads + head, batch * heads + head
    x = tl.zeros([DK, DV], NUMBER)
    if not IS_BACKWARD:
        x = _read(state + job * d_qk * d_v, d, d_qk, d_v, e, d_v, NUMBER)
    for number in tl.range(0, chunks, num_stages=STAGES):
        chunk = number
        if IS_BACKWARD:
            chunk = chunks - 1 - number
        time, at = chunk * T + tl.arange(0, T), job * chunks + chunk
        y = _read(given + first * d_v, time, length, heads * d_v, e, d_v, NUMBER)
        rate = _read(b + first, time, length, heads, tl.arange(0, 1), 1, NUMBER)
        n = _read(inverse + at * T * T, tl.arange(0, T), T, T, tl.arange(0, T), T, NUMBER)
        w = _read(reads + first * d_qk, time, length, heads * d_qk, d, d_qk, NUMBER)
        k = _read(writes + first * d_qk, time, length, heads * d_qk, d, d_qk, NUMBER)
        whole = _read(products + at * channels, tl.arange(0, 1), 1, 0, g, channels, NUMBER)
        x_now = tl.trans(whole) * x
        if IS_BACKWARD:
            y = rate * (y + tl.dot(k, x, input_precision=PRECISION))
            result = tl.dot(tl.trans(n), y, input_precision=PRECISION)
            x = x_now - tl.dot(tl.trans(w), y, input_precision=PRECISION)
        else:
            result = tl.dot(n, y, input_precision=PRECISION) - tl.dot(w, x, input_precision=PRECISION)
            x = x_now + tl.dot(tl.trans(k), rate * result, input_precision=PRECISION)
        _write(found + first * d_v, time, length, heads * d_v, e, d_v, result)


def solve(found: Tensor, given: Tensor, k: Tensor, a: Tensor, b: Tensor, state: Tensor, *, is_backward: bool) -> None:
    """Fill u from v, or dv from e."""
    batch, length, heads, d_qk = k.shape
    d_v, chunks = given.shape[3], triton.cdiv(length, _T)
    inverse = k.new_empty(batch * heads * chunks, _T, _T)
    products = k.new_empty(batch * heads * chunks, a.shape[3])
    reads, writes = torch.empty_like(k), torch.empty_like(k)
    keys = max(16, triton.next_power_of_2(d_qk))
    columns = max(16, min(_TILE // keys, triton.next_power_of_2(d_v)))
    options = {
        "T": _T, "DK": keys, "SCALAR": a.shape[3] == 1,
        "PRECISION": "ieee" if k.dtype == torch.float64 else "tf32x3", "num_warps": 4,
    }  # fmt: skip
    with on_device_of(k):
        prepared = inverse, reads, writes, products
        _prepare[(batch * heads * chunks,)](k, a, b, *prepared, length, heads, d_qk, chunks, **options)
        _walk[(batch * heads * triton.cdiv(d_v, columns),)](
            given, b, *prepared, state, found, length, heads, d_qk, d_v, chunks,
            IS_BACKWARD=is_backward, DV=columns, STAGES=_STAGES, **options,
        )  # fmt: skip


def forward_into(
    y: Tensor, last: Tensor, u: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> None:
    """Fill y, the last state and u; all are contiguous and of one type."""
    solve(u, v, k, a, b, state, is_backward=False)
    linear.forward_into(y, last, q, k, b * u, a, state)


def _in_turn(x: Tensor, y: Tensor) -> Tensor:
    """Interleave the steps of two tensors."""
    return torch.stack([x, y], 2).flatten(1, 2)


def backward_into(
    gradients: tuple[Tensor, ...], dy: Tensor, dlast: Tensor, q: Tensor, k: Tensor, a: Tensor, b: Tensor, u: Tensor,
    state: Tensor,
) -> None:  # fmt: skip
    """Fill dq, dk, dv, da, db and dstate; all are contiguous and of one type."""
    dq, dk, dv, da, db, dstate = gradients
    e = torch.empty_like(u)
    linear_backward.values_into(e, dstate, dy, dlast, q, k, a)
    solve(dv, e, k, a, b, state, is_backward=True)
    steps = (
        _in_turn(-dv, dy), dlast, _in_turn(k, q), _in_turn(torch.zeros_like(k), k),
        _in_turn(torch.zeros_like(u), b * u), _in_turn(a, torch.ones_like(a)), state,
    )  # fmt: skip
    found = tuple(torch.empty_like(x) for x in steps[2:])
    linear_backward.backward_into(found, *steps)
    (of_reads, of_q), (_, of_writes), (_, dw), (of_a, _) = (x.unflatten(1, (-1, 2)).unbind(2) for x in found[:4])
    dq.copy_(of_q), da.copy_(of_a), dstate.copy_(found[4])
    torch.add(of_reads, of_writes, out=dk)
    torch.sum(dw * u, -1, keepdim=True, out=db)
