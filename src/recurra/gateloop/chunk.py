"""GateLoop in chunks: surrogate attention inside a chunk, the recurrence between chunks, matrix products throughout.

The decay from step j to step i of a chunk is prod_{l=j+1..i} a_l. A quotient of cumulative products would underflow, so
a chunk is halved again and again. Between the left and the right half of a block, the decay is the product of the
transitions after j in the left half and those up to i in the right half,

    S[right, left] = (Q up)_right ((K after)_left)^T,

so one matrix product gives all scores between the halves, for a transition per channel too. Every factor is a product
of the transitions themselves: exact for transitions of 0, and only the result can underflow. up, after and those of
the next level follow from one multiplication each. Symbols and shapes are those of `modes`.
"""

import torch
from jaxtyping import Shaped
from torch import Tensor

from recurra.gateloop.blocks import into_blocks
from recurra.scan.linear import linear_scan

CHUNK = 64
"""Steps per chunk, a power of 2."""


def chunk(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, h: Tensor, backend: str
) -> tuple[Shaped[Tensor, "B L H d_v"], Shaped[Tensor, "B H d_qk d_v"]]:
    """Take O(L (chunk + d_qk d_v / chunk) d) work in matrix products and O(L (d + chunk + d_qk d_v / chunk)) memory."""
    length, dtype = q.shape[1], a.dtype
    size = min(CHUNK, 1 << (length - 1).bit_length())
    q, k, v = (into_blocks(x.to(dtype), size, 0.0) for x in (q, k, v))
    a = into_blocks(a, size, 1.0)
    scores, up_to, after = (scalar_scores if a.shape[-1] == 1 else vector_scores)(q, k, a)
    # What each chunk adds to the state; then a scan over chunks gives the state at the start of each.
    added = (k * after).transpose(-1, -2) @ v
    whole = up_to[..., -1, :, None]
    states = linear_scan(whole.transpose(1, 2), added.transpose(1, 2), h, backend=backend).transpose(1, 2)
    before = torch.cat([h[:, :, None], states[:, :, :-1]], 2)
    y = scores @ v + (q * up_to) @ before
    return y.flatten(2, 3)[:, :, :length].transpose(1, 2), states[:, :, -1].clone()


def scalar_scores(q: Tensor, k: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute each chunk's scores (..., C, C) for one transition per head, and the products up to and after steps."""
    decay, up_to, after = decays(a)
    return (q @ k.transpose(-1, -2)) * decay, up_to, after


def decays(a: Shaped[Tensor, "*batch C 1"]) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply the transitions of a chunk between all its steps, one transition per head.

    Returns:
        prod_{l=j+1..i} a_l as (..., C, C) with row i and column j, zeros above the diagonal; the products from the
        chunk's start up to each step and those after it to the chunk's end, both (..., C, 1).
    """
    up_to, after, decay = a, torch.ones_like(a), torch.ones_like(a)[..., None]
    while up_to.shape[-2] > decay.shape[-2]:
        halves = _Halves(up_to, after, decay.shape[-2])
        decay = halves.assemble(decay, halves.right_up @ halves.left_after.transpose(-1, -2))
        up_to, after = halves.joined()
    return decay[..., 0, :, :], up_to, after


def vector_scores(q: Tensor, k: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same for a transition per key channel."""
    up_to, after, scores = a, torch.ones_like(a), (q * k).sum(-1)[..., None, None]
    while up_to.shape[-2] > scores.shape[-2]:
        size = scores.shape[-2]
        halves = _Halves(up_to, after, size)
        right_q, left_k = _halved(q, size)[..., 1, :, :], _halved(k, size)[..., 0, :, :]
        between = (right_q * halves.right_up) @ (left_k * halves.left_after).transpose(-1, -2)
        scores = halves.assemble(scores, between)
        up_to, after = halves.joined()
    return scores[..., 0, :, :], up_to, after


class _Halves:
    """Pairs of neighbouring blocks of `size` steps, to be joined into blocks of twice the size."""

    def __init__(self, up_to: Tensor, after: Tensor, size: int) -> None:
        up, rest = _halved(up_to, size), _halved(after, size)
        self.left_up, self.right_up = up[..., 0, :, :], up[..., 1, :, :]
        self.left_after, self.right_after = rest[..., 0, :, :], rest[..., 1, :, :]

    def joined(self) -> tuple[Tensor, Tensor]:
        """Multiply the transitions from a block's start up to each step, and after each step to the block's end."""
        left, right = self.left_up[..., -1:, :], self.right_up[..., -1:, :]
        up_to = torch.stack([self.left_up, self.right_up * left], -3)
        after = torch.stack([self.left_after * right, self.right_after], -3)
        return up_to.flatten(-4, -2), after.flatten(-4, -2)

    @staticmethod
    def assemble(
        diagonal: Shaped[Tensor, "*batch blocks n n"], below: Shaped[Tensor, "*batch half n n"]
    ) -> Shaped[Tensor, "*batch half m m"]:
        """Build lower triangular matrices of twice the size from those of the halves and the scores between them."""
        pairs = diagonal.unflatten(-3, (-1, 2))
        upper = torch.cat([pairs[..., 0, :, :], torch.zeros_like(below)], -1)
        lower = torch.cat([below, pairs[..., 1, :, :]], -1)
        return torch.cat([upper, lower], -2)


def _halved(x: Shaped[Tensor, "*batch C d"], size: int) -> Shaped[Tensor, "*batch half 2 n d"]:
    return x.unflatten(-2, (-1, 2, size))
