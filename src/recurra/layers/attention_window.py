"""Attention with segment-level recurrence: how a stream splits into segments, and which keys a step sees."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from recurra.checks import require, require_at_least


def head_size(d_model: int, n_heads: int, d_head: int | None) -> int:
    """Return the channels of a head: `d_head`, or d_model / n_heads if that is None.

    Raises:
        ValueError: a size is below 1, or the heads do not divide d_model and `d_head` is None.
    """
    require_at_least(1, d_model=d_model, n_heads=n_heads)
    if d_head is None:
        require(d_model % n_heads == 0, "n_heads", n_heads, f"a divisor of d_model = {d_model}", "or set d_head")
        return d_model // n_heads
    require_at_least(1, d_head=d_head)
    return d_head


@dataclass(frozen=True)
class AttentionWindow:
    """The lengths of Transformer-XL's attention (arXiv 1901.02860, section 3.2).

    A stream splits into segments at multiples of `segment_length`, however it is cut into calls. A step sees the
    memory, which is the last `mem_len` steps before its segment, and its own segment up to itself. With `same_length`
    it sees only the last `mem_len` of these steps, including itself, so that every step sees the same number once the
    stream is long enough. Distances beyond `clamp_len` are encoded as `clamp_len`.

    Raises:
        ValueError: a length is out of range.
    """

    segment_length: int
    mem_len: int
    same_length: bool = False
    clamp_len: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, segment_length=self.segment_length)
        require(self.mem_len >= 0, "mem_len", self.mem_len, "at least 0, which means no memory")
        enough = self.mem_len >= 1 or not self.same_length
        mend = "a step sees mem_len steps, including itself"
        require(enough, "mem_len", self.mem_len, "at least 1 with same_length", mend)
        positive = self.clamp_len is None or self.clamp_len >= 1
        require(positive, "clamp_len", self.clamp_len, "at least 1, or None for no limit")

    def pieces(self, n_steps: int, position: int) -> list[int]:
        """Split `n_steps` (at least 1) at the borders of segments; the first step is at `position` in its segment."""
        first = min(n_steps, self.segment_length - position)
        whole, rest = divmod(n_steps - first, self.segment_length)
        return [first, *[self.segment_length] * whole, *([rest] if rest else [])]

    def masked(self, n_queries: int, n_keys: int, device: torch.device) -> Bool[Tensor, "n_queries n_keys"]:
        """Mark the keys that a query must not see; the queries are the last `n_queries` of the keys' steps."""
        query = torch.arange(n_keys - n_queries, n_keys, device=device)
        distance = query[:, None] - torch.arange(n_keys, device=device)
        future = distance < 0
        return future | (distance >= self.mem_len) if self.same_length else future
