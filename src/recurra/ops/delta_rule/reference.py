"""The gated delta rule computed in two ways with one result (y, h_L): step by step, and in chunks.

h_t = (I - b_t k_t^T k_t) diag(a_t) h_{t-1} + b_t k_t^T v_t and y_t = q_t h_t, with rows q_t, k_t, v_t and a_t.
Shapes: q, k (B, L, H, d_qk); v (B, L, H, d_v); a (B, L, H, 1 or d_qk); b (B, L, H, 1); h (B, H, d_qk, d_v). Both modes
take at least one step of tensors of one compute type (see `operator.py`).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.ops._causality import causal_in_nonfinite
from recurra.ops.gate_loop.reference import into_blocks, scores_between

_CHUNK = 64  # steps, a power of 2

_Result = tuple[Float[Tensor, "B L H d_v"], Float[Tensor, "B H d_qk d_v"]]


def recurrent(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, h: Tensor) -> _Result:
    """Compute step by step in plain torch, in the form that names the rule.

    The state decays, predicts the value of the key, and learns the difference: h = diag(a) h_{t-1},
    h_t = h + b k^T (v - k h).
    """
    outputs = []
    for q_t, k_t, v_t, a_t, b_t in zip(*(x.unsqueeze(-2).unbind(1) for x in (q, k, v, a, b))):
        h = a_t.transpose(-1, -2) * h
        h = h + k_t.transpose(-1, -2) * (b_t * (v_t - k_t @ h))
        outputs.append((q_t @ h).squeeze(-2))
    return torch.stack(outputs, 1), h


@causal_in_nonfinite(5)
def chunk(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, h: Tensor) -> _Result:
    """Compute in chunks of 64 steps by matrix products (Yang et al., arXiv 2406.06484, and arXiv 2412.06464).

    What step i of a chunk writes is w_i = b_i (v_i - k_i diag(a_i) h_{i-1}), and then the rule is linear attention with
    values w: with D_ij the diagonal product of the decays after j up to i, and h the state that enters the chunk,

        h_i = D_i0 h + sum_{j<=i} D_ij k_j^T w_j.

    Put into the line above, this is one triangular system for all steps of the chunk (the papers' UT transform),

        (I + L) w = b v - (b k D_0) h,    L_ij = b_i k_i D_ij k_j^T below the diagonal and 0 elsewhere,

    solved for both right-hand sides before h is known. The solutions grow no larger than the recurrence does: for unit
    keys, b in [0, 2] and decays of at most 1 the elements of the inverse are at most 4. The products D are formed by
    multiplication alone (see `recurra.ops.gate_loop.reference`), so decays of 0, and products that underflow, are
    exact.
    """
    length, d_v = q.shape[1], v.shape[-1]
    size = min(_CHUNK, 1 << (length - 1).bit_length())
    q, k, v, b = (into_blocks(x, size, 0.0) for x in (q, k, v, b))
    (of_keys, of_queries), up_to, after = scores_between(torch.stack([k, q]), k, into_blocks(a, size, 1.0))
    below = b * of_keys  # the solver reads only what is below the diagonal
    targets = torch.cat([b * v, b * up_to * k], -1)
    of_values, of_state = torch.linalg.solve_triangular(below, targets, upper=False, unitriangular=True).split(
        [d_v, k.shape[-1]], -1
    )
    whole, to_the_end = up_to[..., -1, :, None], (k * after).transpose(-1, -2)
    before, written = [], []
    for values, read, a_chunk, k_chunk in zip(*(x.unbind(2) for x in (of_values, of_state, whole, to_the_end))):
        before.append(h)
        written.append(values - read @ h)
        h = a_chunk * h + k_chunk @ written[-1]
    y = (q * up_to) @ torch.stack(before, 2) + of_queries @ torch.stack(written, 2)
    return y.flatten(2, 3)[:, :, :length].transpose(1, 2), h


# The generalised rule: h_t = diag(a_t) h_{t-1} + z_t^T (r_t h_{t-1}) + k_t^T v_t, with r, z and a of the shape of q.


def generalised_recurrent(q: Tensor, k: Tensor, v: Tensor, a: Tensor, r: Tensor, z: Tensor, h: Tensor) -> _Result:
    """Compute step by step in plain torch."""
    outputs = []
    for q_t, k_t, v_t, a_t, r_t, z_t in zip(*(x.unsqueeze(-2).unbind(1) for x in (q, k, v, a, r, z))):
        read = r_t @ h
        h = a_t.mT * h + z_t.mT * read + k_t.mT * v_t
        outputs.append((q_t @ h).squeeze(-2))
    return torch.stack(outputs, 1), h


@causal_in_nonfinite(6)
def generalised_chunk(q: Tensor, k: Tensor, v: Tensor, a: Tensor, r: Tensor, z: Tensor, h: Tensor) -> _Result:
    """Compute in chunks of 64 steps, as `chunk` does: u_i = r_i h_{i-1}, which z_i^T writes, is w there.

    r_i reads what the steps before i have left, as a query of step i - 1 would: so the rows of its scores, computed one
    step early, are moved down by one, and nothing is divided. The triangular system of a chunk is

        (I - L) u = r D_{i-1,0} h + M v,    L_ij = r_i D_{i-1,j} z_j^T and M_ij = r_i D_{i-1,j} k_j^T for j < i.
    """
    length, d_v = q.shape[1], v.shape[-1]
    size = min(_CHUNK, 1 << (length - 1).bit_length())
    q, k, v, r, z = (into_blocks(x, size, 0.0) for x in (q, k, v, r, z))
    early = torch.cat([r[..., 1:, :], torch.zeros_like(r[..., :1, :])], -2)
    readers, writers = torch.stack([early, q])[:, None], torch.stack([z, k])
    scores, up_to, after = scores_between(readers, writers, into_blocks(a, size, 1.0))
    (of_z, of_k), (y_of_z, y_of_k) = scores
    of_z, of_k = (torch.cat([torch.zeros_like(x[..., :1, :]), x[..., :-1, :]], -2) for x in (of_z, of_k))
    of_state = r * torch.cat([torch.ones_like(up_to[..., :1, :]), up_to[..., :-1, :]], -2)
    targets = torch.cat([of_k @ v, of_state], -1)
    of_values, of_state = torch.linalg.solve_triangular(-of_z, targets, upper=False, unitriangular=True).split(
        [d_v, k.shape[-1]], -1
    )
    of_chunks = of_values, of_state, up_to[..., -1, :, None], (z * after).mT, (k * after).mT @ v
    before, written = [], []
    for values, reads, a_chunk, z_chunk, new in zip(*(x.unbind(2) for x in of_chunks)):
        before.append(h)
        written.append(values + reads @ h)
        h = a_chunk * h + z_chunk @ written[-1] + new
    y = (q * up_to) @ torch.stack(before, 2) + y_of_z @ torch.stack(written, 2) + y_of_k @ v
    return y.flatten(2, 3)[:, :, :length].transpose(1, 2), h
