"""The residual blocks: time mixing, then channel mixing (GateLoop App. C), or time mixing alone."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from recurra.layers import FeedForward


class MixerBlock(nn.Module):
    """x = x + TimeMixing(LayerNorm(x)). Pre-norm is our choice; the paper leaves it open.

    Args:
        mixer: the time mixing layer, `(x, state) -> (y, state)`.
        d_model: channels.
        dropout: probability of dropping a channel of what the block adds.
    """

    def __init__(self, mixer: nn.Module, d_model: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_mixing = nn.LayerNorm(d_model)
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
    """x = x + TimeMixing(LayerNorm(x)); x = x + FFN(LayerNorm(x)).

    Args:
        mixer: the time mixing layer, `(x, state) -> (y, state)`.
        d_model: channels.
        d_channel_mixing: hidden channels of the feed-forward network.
        dropout: probability of dropping a channel of what each half adds, and inside the feed-forward network.
    """

    def __init__(self, mixer: nn.Module, d_model: int, d_channel_mixing: int, dropout: float = 0.0) -> None:
        super().__init__(mixer, d_model, dropout)
        self.norm_feed_forward = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model, d_channel_mixing, dropout)

    def forward(
        self, x: Float[Tensor, "B L d_model"], state: Any = None, **lengths: Any
    ) -> tuple[Float[Tensor, "B L d_model"], Any]:
        """Apply both halves, continuing as `MixerBlock.forward` does."""
        x, state = super().forward(x, state, **lengths)
        return x + self.dropout(self.feed_forward(self.norm_feed_forward(x))), state
