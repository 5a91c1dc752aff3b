"""The Transformer-XL block, post-norm as published, or pre-norm, around any attention `(x, state) -> (y, state)`."""

from collections.abc import Callable
from typing import Any, cast

from jaxtyping import Float
from torch import Tensor, nn


class TransformerXLBlock(nn.Module):
    """The parts: attention, a feed-forward network with ReLU, and a norm and a dropout for each.

    Args:
        attention: the attention; its `d_model` is its number of channels.
        d_channel_mixing: hidden channels of the feed-forward network.
        make_dropout: makes the dropout after the attention, inside and after the feed-forward network.
    """

    def __init__(self, attention: nn.Module, d_channel_mixing: int, make_dropout: Callable[[], nn.Module]) -> None:
        super().__init__()
        d_model = cast(int, attention.d_model)
        self.attention = attention
        self.dropout = make_dropout()
        self.norm_attention = nn.LayerNorm(d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, d_channel_mixing),
            nn.ReLU(),
            make_dropout(),
            nn.Linear(d_channel_mixing, d_model),
            make_dropout(),
        )
        self.norm_feed_forward = nn.LayerNorm(d_model)


class PostNormBlock(TransformerXLBlock):
    """x = LayerNorm(x + Attention(x)); x = LayerNorm(x + FFN(x)) (Transformer-XL, section 3.3)."""

    def forward(
        self, x: Float[Tensor, "B L d_model"], state: Any = None, **shared: Tensor
    ) -> tuple[Float[Tensor, "B L d_model"], Any]:
        """Apply the block, continuing from the attention's `state`; `shared` is what it shares with other layers'."""
        attended, state = self.attention(x, state, **shared)
        x = self.norm_attention(x + self.dropout(attended))
        return self.norm_feed_forward(x + self.feed_forward(x)), state


class PreNormBlock(TransformerXLBlock):
    """x = x + Attention(LayerNorm(x)); x = x + FFN(LayerNorm(x)).

    The attention's memory, if it has one, holds LayerNorm(x), and the norm gets no gradient from it.
    `PreNormMemoryBlock` is the published code's.
    """

    def forward(
        self, x: Float[Tensor, "B L d_model"], state: Any = None, **shared: Tensor
    ) -> tuple[Float[Tensor, "B L d_model"], Any]:
        """Apply the block, continuing from the attention's `state`; `shared` is what it shares with other layers'."""
        attended, state = self.attention(self.norm_attention(x), state, **shared)
        x = x + self.dropout(attended)
        return x + self.feed_forward(self.norm_feed_forward(x)), state


class PreNormMemoryBlock(TransformerXLBlock):
    """x = x + Attention(LayerNorm(x)); x = x + FFN(LayerNorm(x)), with a memory of x (the published `pre_lnorm`).

    The attention applies the norm to memory and segment together, so that the norm's weights get gradients from both.
    """

    def forward(
        self, x: Float[Tensor, "B L d_model"], state: Any = None, **shared: Tensor
    ) -> tuple[Float[Tensor, "B L d_model"], Any]:
        """Apply the block, continuing from the attention's `state`; `shared` is what it shares with other layers'."""
        attended, state = self.attention(x, state, norm=self.norm_attention, **shared)
        x = x + self.dropout(attended)
        return x + self.feed_forward(self.norm_feed_forward(x)), state


TRANSFORMER_XL_BLOCKS: dict[str, type[PostNormBlock] | type[PreNormBlock]] = {
    "post": PostNormBlock,
    "pre": PreNormBlock,
}
"""The blocks by the place of their norms."""
