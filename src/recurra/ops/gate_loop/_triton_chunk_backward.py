"""The gradients of GateLoop in chunks on a GPU, in Triton: two kernels that walk through each chunk from its end.

With G_t the gradient of S_t, G_t = conj(q_t)^T dy_t + conj(a_{t+1}) G_{t+1},

    dq_t = dy_t conj(S_t)^T;  dk_t = conj(v_t) G_t^T;  dv_t = conj(k_t) G_t;  da_t = sum over v of G_t conj(S_{t-1})

q, k, v, a and S are read as their conjugates, so no other conjugate appears below. One kernel has tiles of value
channels, for dv. The other has tiles of key channels, for dq, dk and da. It needs both S at the start of a block and G
at its end, so it recomputes S from the chunk's first state for every block instead of storing it. In a block, with
X = dY S^T, Y = V G^T and Z = sum over v of S G, M_t = dy_i S_{t-1}^T for all i at once and N_t = G_T S_{t-1} follow the
recurrence, and

    da_t = sum over i >= t of a_{t+1} ... a_i q_i M_t,i + a_{t+1} ... a_T N_t

needs no division by a_t. For one transition per head, all of this is matrix products of (T, T).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops._toolkit.triton import floats, multiply, on_device_of
from recurra.ops.gate_loop._triton_chunk import (
    block_products,
    decays,
    dot,
    layout,
    load,
    multiply_where,
    place,
    scores,
    states_between,
    store,
    strides,
    times,
)


@triton.jit
def _values(  # type: ignore[no-untyped-def]
    dy, q, k, a, carry, dv, dstate, dy_batch, dy_time, dy_head, q_batch, q_time, q_head, k_batch, k_time, k_head,
    a_batch, a_time, a_head, length, heads, d_qk, d_v, chunks,
    SPAN: tl.constexpr, T: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SCALAR: tl.constexpr, C: tl.constexpr,
    X: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill dv (B, L, H, d_v) and dstate (B H, d_qk, d_v); carry (B H, d_qk, chunks, d_v), the last chunk first."""
    NUMBER: tl.constexpr = dstate.dtype.element_ty
    WIDTH: tl.constexpr = 2 if C else 1
    V_WIDTH: tl.constexpr = 2 if X else 1
    KEYS: tl.constexpr = 1 if SCALAR else DK
    batch, head, chunk, tile = place(heads, chunks, tl.cdiv(d_v, DV))
    d, e, gate, channels = tl.arange(0, DK), tile * DV + tl.arange(0, DV), tl.arange(0, KEYS), d_qk
    if SCALAR:
        channels = 1
    dy += batch * dy_batch + head * dy_head
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    a += batch * a_batch + head * a_head
    dv += V_WIDTH * (batch * length * heads + head) * d_v
    sequence = batch * heads + head
    carry += WIDTH * (sequence * d_qk * chunks + chunks - 1 - chunk) * d_v
    g_re, g_im = load(carry, d, d_qk, WIDTH * chunks * d_v, e, d_v, 0.0, C, False, NUMBER)
    for block in range(0, SPAN, T):
        start = chunk * SPAN + SPAN - T - block
        time = start + tl.arange(0, T)
        q_re, q_im = load(q, time, length, q_time, d, d_qk, 0.0, X, True, NUMBER)
        k_re, k_im = load(k, time, length, k_time, d, d_qk, 0.0, X, True, NUMBER)
        dy_re, dy_im = load(dy, time, length, dy_time, e, d_v, 0.0, C, False, NUMBER)
        up_re, up_im, after_re, after_im, whole_re, whole_im = block_products(
            a, start, length, a_time, gate, channels, C, True, T, NUMBER
        )
        s_re, s_im = scores(
            q_re, q_im, k, k_time, a, a_time, start, length, d, d_qk, SCALAR, C, X, True, T, NUMBER, PRECISION
        )
        near_re, near_im = dot(tl.trans(s_re), tl.trans(s_im), dy_re, dy_im, C, C, PRECISION)
        k_re, k_im = times(k_re, k_im, after_re, after_im, X, C)
        far_re, far_im = dot(k_re, k_im, g_re, g_im, C, C, PRECISION)
        store(dv, time, length, V_WIDTH * heads * d_v, e, d_v, near_re + far_re, near_im + far_im, X)
        q_re, q_im = times(q_re, q_im, up_re, up_im, X, C)
        g_re, g_im = multiply(g_re, g_im, tl.trans(whole_re), tl.trans(whole_im), C)
        new_re, new_im = dot(tl.trans(q_re), tl.trans(q_im), dy_re, dy_im, C, C, PRECISION)
        g_re, g_im = g_re + new_re, g_im + new_im
    dstate += WIDTH * sequence * d_qk * d_v
    store(dstate, d, tl.where(chunk == 0, d_qk, 0), WIDTH * d_v, e, d_v, g_re, g_im, C)


@triton.jit
def _scalar_block(  # type: ignore[no-untyped-def]
    q_re, q_im, k_re, k_im, ds_re, ds_im, x_re, x_im, y_re, y_im, z_re, z_im,
    a, a_time, start, length, C: tl.constexpr, X: tl.constexpr, T: tl.constexpr, NUMBER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk (T, DK) and da (T, 1) of a block, one transition per head; ds = dY V^T (T, T), z (1, DK)."""
    i, j, one = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :], tl.arange(0, 1)
    up_re, up_im, after_re, after_im, _, _ = block_products(a, start, length, a_time, one, 1, C, True, T, NUMBER)
    d_re, d_im = decays(a, start, length, a_time, C, True, T, NUMBER)
    # up to the step before: a_1 ... a_{t-1}, and a_{j+1} ... a_{t-1} for t > j
    before_re, before_im = tl.full([T, 1], 1.0, NUMBER), tl.zeros([T, 1], NUMBER)
    e_re, e_im = tl.where(i > j, 1.0, 0.0).to(NUMBER), tl.zeros([T, T], NUMBER)
    for t in range(T):
        a_re, a_im = load(a, start + t + one, length, a_time, one, 1, 1.0, C, True, NUMBER)
        before_re, before_im = multiply_where(i > t, before_re, before_im, a_re, a_im, C)
        e_re, e_im = multiply_where((i > t) & (j < t), e_re, e_im, a_re, a_im, C)

    w_re, w_im = dot(q_re, q_im, tl.trans(k_re), tl.trans(k_im), X, X, PRECISION)
    w_re, w_im = times(w_re, w_im, ds_re, ds_im, X, C)
    r_re, r_im = dot(tl.trans(d_re), tl.trans(d_im), w_re, w_im, C, C, PRECISION)
    r_re, r_im = multiply(r_re, r_im, e_re, e_im, C)
    da_re, da_im = tl.sum(r_re, 1, keep_dims=True), tl.sum(r_im, 1, keep_dims=True)
    qx_re, qx_im = times(q_re, q_im, x_re, x_im, X, C)
    ky_re, ky_im = times(k_re, k_im, y_re, y_im, X, C)
    # from the steps before the block, as its own steps see them: sum over i of D_it q_i X_i
    r_re, r_im = multiply(d_re, d_im, tl.sum(qx_re, 1, keep_dims=True), tl.sum(qx_im, 1, keep_dims=True), C)
    r_re, r_im = tl.trans(tl.sum(r_re, 0, keep_dims=True)), tl.trans(tl.sum(r_im, 0, keep_dims=True))
    r_re, r_im = multiply(r_re, r_im, before_re, before_im, C)
    da_re, da_im = da_re + r_re, da_im + r_im
    # and from all, as the steps after the block see them
    ky_re, ky_im = tl.trans(tl.sum(ky_re, 1, keep_dims=True)), tl.trans(tl.sum(ky_im, 1, keep_dims=True))
    r_re, r_im = multiply(e_re, e_im, ky_re, ky_im, C)
    n_re, n_im = multiply(before_re, before_im, tl.sum(z_re, 1, keep_dims=True), tl.sum(z_im, 1, keep_dims=True), C)
    n_re, n_im = n_re + tl.sum(r_re, 1, keep_dims=True), n_im + tl.sum(r_im, 1, keep_dims=True)
    n_re, n_im = multiply(n_re, n_im, after_re, after_im, C)
    da_re, da_im = da_re + n_re, da_im + n_im

    d_re, d_im = multiply(d_re, d_im, ds_re, ds_im, C)
    dq_re, dq_im = dot(d_re, d_im, k_re, k_im, C, X, PRECISION)
    x_re, x_im = multiply(x_re, x_im, up_re, up_im, C)
    dk_re, dk_im = dot(tl.trans(d_re), tl.trans(d_im), q_re, q_im, C, X, PRECISION)
    y_re, y_im = multiply(y_re, y_im, after_re, after_im, C)
    return dq_re + x_re, dq_im + x_im, dk_re + y_re, dk_im + y_im, da_re, da_im


@triton.jit
def _vector_block(  # type: ignore[no-untyped-def]
    q_re, q_im, k, k_time, ds_re, ds_im, m_re, m_im, y_re, y_im, n_re, n_im,
    a, a_time, start, length, d, d_qk, C: tl.constexpr, X: tl.constexpr, T: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk and da (T, DK) of a block with a transition per key channel; m and n start as X and Z."""
    i, j, one = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :], tl.arange(0, 1)
    dq_re, dq_im = tl.zeros(q_re.shape, NUMBER), tl.zeros(q_re.shape, NUMBER)
    dk_re, dk_im, da_re, da_im = dq_re, dq_im, dq_re, dq_im
    for t in range(T):
        # q_i a_{t+1} ... a_i for i >= t, and a_{t+1} ... a_T
        c_re = tl.where(i >= t, q_re, 0.0)
        c_im = tl.zeros(q_re.shape, NUMBER)
        if X:
            c_im = tl.where(i >= t, q_im, 0.0)
        after_re, after_im = tl.full([1, q_re.shape[1]], 1.0, NUMBER), tl.zeros([1, q_re.shape[1]], NUMBER)
        for s in range(t + 1, T):
            a_re, a_im = load(a, start + s + one, length, a_time, d, d_qk, 1.0, C, True, NUMBER)
            c_re, c_im = multiply_where(i >= s, c_re, c_im, a_re, a_im, C)
            after_re, after_im = multiply(after_re, after_im, a_re, a_im, C)
        p_re, p_im = multiply(c_re, c_im, m_re, m_im, C)
        r_re, r_im = multiply(after_re, after_im, n_re, n_im, C)
        r_re, r_im = r_re + tl.sum(p_re, 0, keep_dims=True), r_im + tl.sum(p_im, 0, keep_dims=True)
        da_re, da_im = tl.where(i == t, r_re, da_re), tl.where(i == t, r_im, da_im)

        column_re = tl.sum(tl.where(j == t, ds_re, 0.0), 1, keep_dims=True)
        column_im = tl.sum(tl.where(j == t, ds_im, 0.0), 1, keep_dims=True)
        row_re = tl.sum(tl.where(i == t, y_re, 0.0), 0, keep_dims=True)
        row_im = tl.sum(tl.where(i == t, y_im, 0.0), 0, keep_dims=True)
        p_re, p_im = multiply(c_re, c_im, column_re, column_im, C)
        r_re, r_im = multiply(after_re, after_im, row_re, row_im, C)
        r_re, r_im = r_re + tl.sum(p_re, 0, keep_dims=True), r_im + tl.sum(p_im, 0, keep_dims=True)
        dk_re, dk_im = tl.where(i == t, r_re, dk_re), tl.where(i == t, r_im, dk_im)

        a_re, a_im = load(a, start + t + one, length, a_time, d, d_qk, 1.0, C, True, NUMBER)
        k_re, k_im = load(k, start + t + one, length, k_time, d, d_qk, 0.0, X, True, NUMBER)
        m_re, m_im = multiply(m_re, m_im, a_re, a_im, C)
        p_re, p_im = times(column_re, column_im, k_re, k_im, C, X)
        m_re, m_im = m_re + p_re, m_im + p_im
        dq_re, dq_im = tl.where(i == t, m_re, dq_re), tl.where(i == t, m_im, dq_im)
        n_re, n_im = multiply(n_re, n_im, a_re, a_im, C)
        p_re, p_im = times(row_re, row_im, k_re, k_im, C, X)
        n_re, n_im = n_re + p_re, n_im + p_im
    return dq_re, dq_im, dk_re, dk_im, da_re, da_im


@triton.jit
def _keys(  # type: ignore[no-untyped-def]
    dy, q, k, v, a, entering, carry, dq, dk, da, dy_batch, dy_time, dy_head, q_batch, q_time, q_head,
    k_batch, k_time, k_head, v_batch, v_time, v_head, a_batch, a_time, a_head, length, heads, d_qk, d_v, chunks,
    SPAN: tl.constexpr, T: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SCALAR: tl.constexpr, C: tl.constexpr,
    X: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill dq, dk and da (B, L, H, d_qk); for one transition per head da (B, L, H, tiles), to be summed over tiles."""
    NUMBER: tl.constexpr = entering.dtype.element_ty
    WIDTH: tl.constexpr = 2 if C else 1
    K_WIDTH: tl.constexpr = 2 if X else 1
    tiles = tl.cdiv(d_qk, DK)
    batch, head, chunk, tile = place(heads, chunks, tiles)
    d, e = tile * DK + tl.arange(0, DK), tl.arange(0, DV)
    gate, channels = d, d_qk
    share, shares = d, d_qk
    if SCALAR:
        gate, channels = tl.arange(0, 1), 1
        share, shares = tile + gate, tiles
    da += WIDTH * (batch * length * heads + head) * shares
    dy += batch * dy_batch + head * dy_head
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    a += batch * a_batch + head * a_head
    dq += K_WIDTH * (batch * length * heads + head) * d_qk
    dk += K_WIDTH * (batch * length * heads + head) * d_qk
    states = (batch * heads + head) * d_qk * chunks
    entering += WIDTH * (states + chunk) * d_v
    carry += WIDTH * (states + chunks - 1 - chunk) * d_v
    g_re, g_im = load(carry, d, d_qk, WIDTH * chunks * d_v, e, d_v, 0.0, C, False, NUMBER)
    i, j = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    for block in range(0, SPAN, T):
        s_re, s_im = load(entering, d, d_qk, WIDTH * chunks * d_v, e, d_v, 0.0, C, True, NUMBER)
        for earlier in range(0, SPAN - T - block, T):
            start = chunk * SPAN + earlier
            time = start + tl.arange(0, T)
            k_re, k_im = load(k, time, length, k_time, d, d_qk, 0.0, X, True, NUMBER)
            v_re, v_im = load(v, time, length, v_time, e, d_v, 0.0, X, True, NUMBER)
            _, _, after_re, after_im, whole_re, whole_im = block_products(
                a, start, length, a_time, gate, channels, C, True, T, NUMBER
            )
            k_re, k_im = times(k_re, k_im, after_re, after_im, X, C)
            s_re, s_im = multiply(s_re, s_im, tl.trans(whole_re), tl.trans(whole_im), C)
            new_re, new_im = dot(tl.trans(k_re), tl.trans(k_im), v_re, v_im, C, X, PRECISION)
            s_re, s_im = s_re + new_re, s_im + new_im
        start = chunk * SPAN + SPAN - T - block
        time = start + tl.arange(0, T)
        q_re, q_im = load(q, time, length, q_time, d, d_qk, 0.0, X, True, NUMBER)
        v_re, v_im = load(v, time, length, v_time, e, d_v, 0.0, X, True, NUMBER)
        dy_re, dy_im = load(dy, time, length, dy_time, e, d_v, 0.0, C, False, NUMBER)
        ds_re, ds_im = dot(dy_re, dy_im, tl.trans(v_re), tl.trans(v_im), C, X, PRECISION)
        ds_re, ds_im = tl.where(i >= j, ds_re, 0.0), tl.where(i >= j, ds_im, 0.0)
        x_re, x_im = dot(dy_re, dy_im, tl.trans(s_re), tl.trans(s_im), C, C, PRECISION)
        y_re, y_im = dot(v_re, v_im, tl.trans(g_re), tl.trans(g_im), X, C, PRECISION)
        z_re, z_im = multiply(s_re, s_im, g_re, g_im, C)
        z_re, z_im = tl.trans(tl.sum(z_re, 1, keep_dims=True)), tl.trans(tl.sum(z_im, 1, keep_dims=True))
        if SCALAR:
            k_re, k_im = load(k, time, length, k_time, d, d_qk, 0.0, X, True, NUMBER)
            dq_re, dq_im, dk_re, dk_im, da_re, da_im = _scalar_block(
                q_re, q_im, k_re, k_im, ds_re, ds_im, x_re, x_im, y_re, y_im, z_re, z_im,
                a, a_time, start, length, C, X, T, NUMBER, PRECISION,
            )  # fmt: skip
        else:
            dq_re, dq_im, dk_re, dk_im, da_re, da_im = _vector_block(
                q_re, q_im, k, k_time, ds_re, ds_im, x_re, x_im, y_re, y_im, z_re, z_im,
                a, a_time, start, length, d, d_qk, C, X, T, NUMBER,
            )  # fmt: skip
        store(dq, time, length, K_WIDTH * heads * d_qk, d, d_qk, dq_re, dq_im, X)
        store(dk, time, length, K_WIDTH * heads * d_qk, d, d_qk, dk_re, dk_im, X)
        store(da, time, length, WIDTH * heads * shares, share, shares, da_re, da_im, C)
        up_re, up_im, _, _, whole_re, whole_im = block_products(
            a, start, length, a_time, gate, channels, C, True, T, NUMBER
        )
        q_re, q_im = times(q_re, q_im, up_re, up_im, X, C)
        g_re, g_im = multiply(g_re, g_im, tl.trans(whole_re), tl.trans(whole_im), C)
        new_re, new_im = dot(tl.trans(q_re), tl.trans(q_im), dy_re, dy_im, C, C, PRECISION)
        g_re, g_im = g_re + new_re, g_im + new_im


def values_into(dv: Tensor, dstate: Tensor, dy: Tensor, dlast: Tensor, q: Tensor, k: Tensor, a: Tensor) -> Tensor:
    """Fill dv and the gradient of the first state; return those of the states between chunks, from the last."""
    laid_out = layout(q, dv, a)
    with on_device_of(q):
        carry = states_between(q, dy, a, dlast, laid_out, is_backward=True)
        _values[laid_out.grid(laid_out.chunks, "v")](
            *map(floats, (dy, q, k, a, carry, dv, dstate)), *strides(dy, q, k, a), *laid_out.sizes, laid_out.chunks,
            **laid_out.options("v"),
        )  # fmt: skip
    return carry


def backward_into(
    gradients: tuple[Tensor, ...],
    dy: Tensor, dlast: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor,
) -> None:  # fmt: skip
    """Fill dq, dk, dv, da and the gradient of the first state, contiguous; the others are as for `forward_into`."""
    dq, dk, dv, da, dstate = gradients
    laid_out = layout(q, v, a)
    shares = da
    if laid_out.is_scalar:
        shares = torch.empty((*q.shape[:3], laid_out.tiles("qk")), dtype=a.dtype, device=a.device)
    with on_device_of(q):
        entering = states_between(k, v, a, state, laid_out, is_backward=False)
        carry = values_into(dv, dstate, dy, dlast, q, k, a)
        _keys[laid_out.grid(laid_out.chunks, "qk")](
            *map(floats, (dy, q, k, v, a, entering, carry, dq, dk, shares)), *strides(dy, q, k, v, a),
            *laid_out.sizes, laid_out.chunks, **laid_out.options("qk"),
        )  # fmt: skip
    if laid_out.is_scalar:
        torch.sum(shares, -1, keepdim=True, out=da)
