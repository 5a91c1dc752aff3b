"""The residual block: time mixing, then channel mixing (GateLoop App. C)."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from recurra.layers import FeedForward


class Block(nn.Module):
    """x = x + TimeMixing(LayerNorm(x)); x = x + FFN(LayerNorm(x)). Pre-norm is our choice; the paper leaves it open.

    Args:
        mixer: the time mixing layer, `(x, state) -> (y, state)`.
        d_model: channels.
        d_channel_mixing: hidden channels of the feed-forward network.
        dropout: probability of dropping a channel of what each half adds, and inside the feed-forward network.
    """

    def __init__(self, mixer: nn.Module, d_model: int, d_channel_mixing: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_mixing = nn.LayerNorm(d_model)
        self.mixer = mixer
        self.norm_feed_forward = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model, d_channel_mixing, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B L d_model"], state: Any = None, **lengths: Any
    ) -> tuple[Float[Tensor, "B L d_model"], Any]:
        """Apply the block, continuing from the mixer's `state`; None is the start of a stream.

        `lengths` are the mixer's `mask` or `cu_seqlens`; x at padding must be finite.
        """
        mixed, state = self.mixer(self.norm_mixing(x), state, **lengths)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feed_forward(self.norm_feed_forward(x))), state
