"""The residual blocks: time mixing, then channel mixing (GateLoop App. C), or time mixing alone."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn


class MixerBlock(nn.Module):
    """x = x + TimeMixing(norm(x)). Pre-norm is our choice; the paper leaves it open.

    Args:
        mixer: the time mixing layer, `(x, state) -> (y, state)`.
        norm: the norm before it.
        dropout: probability of dropping a channel of what the block adds.
    """

    def __init__(self, mixer: nn.Module, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_mixing = norm
        self.mixer = mixer
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B L d_model"], state: Any = None, **lengths: Any
    ) -> tuple[Float[Tensor, "B L d_model"], Any]:
        """Apply the block, continuing from the mixer's `state`; None is the start of a stream.

        `lengths` are the mixer's `mask` or `cu_seqlens`; x at padding must be finite.
        """
        mixed, state = self.mixer(self.norm_mixing(x), state, **lengths)
        return x + self.dropout(mixed), state


class Block(MixerBlock):
    """x = x + TimeMixing(norm(x)); x = x + FFN(norm(x)).

    Args:
        mixer: the time mixing layer, `(x, state) -> (y, state)`.
        norm: the norm before it.
        feed_forward: the network of each step.
        norm_feed_forward: the norm before that.
        dropout: probability of dropping a channel of what each half adds.
    """

    def __init__(
        self,
        mixer: nn.Module,
        norm: nn.Module,
        feed_forward: nn.Module,
        norm_feed_forward: nn.Module,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(mixer, norm, dropout)
        self.norm_feed_forward = norm_feed_forward
        self.feed_forward = feed_forward

    def forward(
        self, x: Float[Tensor, "B L d_model"], state: Any = None, **lengths: Any
    ) -> tuple[Float[Tensor, "B L d_model"], Any]:
        """Apply both halves, continuing as `MixerBlock.forward` does."""
        x, state = super().forward(x, state, **lengths)
        return x + self.dropout(self.feed_forward(self.norm_feed_forward(x))), state
