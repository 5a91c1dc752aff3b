"""GateLoop's recurrence computed in three ways with one result (y, h_L): step by step, by a scan, as attention.

Symbols are those of GateLoop (7)-(9): h_n = h_{n-1} a_n + k_n^T v_n, y_n = q_n h_n; a_n acts on the key side.
Shapes: q, k (B, L, H, d_qk); v (B, L, H, d_v); a (B, L, H, 1) or (B, L, H, d_qk); h (B, H, d_qk, d_v). All modes take
tensors of one compute type (see `operator.py`) and a state.
"""

import torch
from jaxtyping import Shaped
from torch import Tensor

from recurra.gateloop.blocks import into_blocks
from recurra.scan.linear import linear_scan

_BLOCK = 32  # steps in a block of the attention mode


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, h: Tensor, backend: str
) -> tuple[Shaped[Tensor, "B L H d_v"], Shaped[Tensor, "B H d_qk d_v"]]:
    """Compute step by step in plain torch: O(L) time, the memory of one state (GateLoop (7)-(8))."""
    outputs = []
    for n in range(q.shape[1]):
        h = a[:, n, :, :, None] * h + k[:, n, :, :, None] * v[:, n, :, None, :]
        outputs.append((q[:, n, :, :, None] * h).sum(-2))
    return torch.stack(outputs, 1), h


def scan(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, h: Tensor, backend: str
) -> tuple[Shaped[Tensor, "B L H d_v"], Shaped[Tensor, "B H d_qk d_v"]]:
    """Compute a linear scan with the leaves (a_n, k_n^T v_n), GateLoop (12)-(13): O(L) work, all L states in memory."""
    states = linear_scan(a[..., None], k[..., :, None] * v[..., None, :], h, backend=backend)
    # a copy, because a view as the next state would keep all states in memory
    return (q[..., :, None] * states).sum(-2), states[:, -1].clone()


def attention(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, h: Tensor, backend: str
) -> tuple[Shaped[Tensor, "B L H d_v"], Shaped[Tensor, "B H d_qk d_v"]]:
    """Compute surrogate attention, GateLoop (14)-(21): Y = ((Q * Pi)(K * Pi^-1)^T . M) V in O(L^2) time and memory.

    The paper warns that Pi underflows. So Pi^-1 is never formed: the decay between two steps, prod_{j=m+1..n} a_j, is
    the product of the transitions after m in m's block, of the whole blocks in between, and of those up to n in n's
    block. Products, unlike differences of log-magnitudes, are exact for transitions of 0, in value and gradient.
    """
    length = q.shape[1]
    block, dtype = min(_BLOCK, length), a.dtype
    q, k, v = (into_blocks(x.to(dtype), block, 0.0) for x in (q, k, v))
    a = into_blocks(a, block, 1.0)
    up_to = a.cumprod(-2)  # within a block: from its start to n, n included
    after = torch.cat([a[..., 1:, :], torch.ones_like(a[..., :1, :])], -2).flip(-2).cumprod(-2).flip(-2)
    whole = up_to[..., -1, :]  # (B, H, blocks, d_a)
    between = segment_products(whole)
    none = torch.zeros_like(between[..., :1, :, :])
    between = torch.cat([none, between[..., :-1, :, :]], -3)  # [I, J]: the blocks after J and before I

    decay = segment_products(a)  # (B, H, blocks, n, m, d_a)
    near = (q[..., :, None, :] * decay * k[..., None, :, :]).sum(-1) @ v
    far_q, far_k = q * up_to, k * after
    scores = torch.einsum("bhIJid,bhJjd->bhIiJj", far_q[:, :, :, None] * between[..., None, :], far_k)
    far = torch.einsum("bhIiJj,bhJjv->bhIiv", scores, v)

    before = torch.cat([torch.ones_like(whole[..., :1, :]), whole.cumprod(-2)], -2)  # all blocks before I
    from_state = (far_q * before[..., :-1, None, :]) @ h[:, :, None]
    y = (near + far + from_state).flatten(2, 3)[:, :, :length].transpose(1, 2)

    to_the_end = torch.cat([between[..., -1, :-1, :] * whole[..., -1:, :], torch.ones_like(whole[..., :1, :])], -2)
    weighted_k = far_k * to_the_end[..., None, :]
    last = before[..., -1, :, None] * h + torch.einsum("bhJjd,bhJjv->bhdv", weighted_k, v)
    return y, last


def segment_products(a: Shaped[Tensor, "*batch n d"]) -> Shaped[Tensor, "*batch n n d"]:
    """Return P[i, j] = prod_{l=j+1..i} a_l for i >= j and 0 for i < j (GateLoop (20)), by direct multiplication."""
    n = a.shape[-2]
    later = torch.ones(n, n, dtype=torch.bool, device=a.device).tril(-1)[..., None]
    factors = torch.where(later, a[..., :, None, :], torch.ones((), dtype=a.dtype, device=a.device))
    on_or_below = torch.ones(n, n, dtype=torch.bool, device=a.device).tril()[..., None]
    return factors.cumprod(-3) * on_or_below
