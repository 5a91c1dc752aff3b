"""What a step of segment-level recurrence sees: how a stream falls into segments, and which keys are visible."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True)
class AttentionWindow:
    """The lengths of Transformer-XL's attention (arXiv 1901.02860, section 3.2).

    A stream falls into segments at the multiples of `segment_length`, however it is cut into calls. A step sees the
    memory, that is, the last `mem_len` steps before its segment, and the steps of its segment up to itself. With
    `same_length` it sees the last `mem_len` of those, itself included: every step the same number, once there are as
    many. Distances beyond `clamp_len` are encoded as `clamp_len`.

    Raises:
        ValueError: a length is out of range.
    """

    segment_length: int
    mem_len: int
    same_length: bool = False
    clamp_len: int | None = None

    def __post_init__(self) -> None:
        if self.segment_length < 1:
            raise ValueError(f"segment_length is {self.segment_length}; expected at least 1")
        if self.mem_len < 0:
            raise ValueError(f"mem_len is {self.mem_len}; expected at least 0, which is no memory")
        if self.same_length and self.mem_len < 1:
            raise ValueError(
                f"same_length lets a step see mem_len steps, itself included, and mem_len is {self.mem_len}; set "
                "mem_len to at least 1"
            )
        if self.clamp_len is not None and self.clamp_len < 1:
            raise ValueError(f"clamp_len is {self.clamp_len}; expected at least 1, or None for no limit")

    def pieces(self, n_steps: int, position: int) -> list[int]:
        """Cut `n_steps` (at least 1) at the borders of segments, the first step being number `position` of its own."""
        first = min(n_steps, self.segment_length - position)
        whole, rest = divmod(n_steps - first, self.segment_length)
        return [first, *[self.segment_length] * whole, *([rest] if rest else [])]

    def masked(self, n_queries: int, n_keys: int, device: torch.device) -> Bool[Tensor, "n_queries n_keys"]:
        """Tell which keys a query must not see; the queries are the last `n_queries` of the keys' steps."""
        query = torch.arange(n_keys - n_queries, n_keys, device=device)
        distance = query[:, None] - torch.arange(n_keys, device=device)
        future = distance < 0
        return future | (distance >= self.mem_len) if self.same_length else future
