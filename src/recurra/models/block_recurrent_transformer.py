"""The Block-Recurrent Transformer (Hutchins et al. 2022, arXiv 2203.07852): one layer of a Transformer is recurrent."""

from dataclasses import dataclass
from typing import NamedTuple, cast

from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require, require_at_least, require_choice
from recurra.mixers.relative_attention import RelativeAttention, RelativeAttentionState
from recurra.models.adaptive_shell import AdaptiveShell, initialise, make_block, make_dropout
from recurra.models.block_recurrent_attention import (
    GATES,
    BlockRecurrentAttention,
    BlockRecurrentAttentionState,
    of_tokens,
)
from recurra.models.registry import register_model
from recurra.models.transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class BlockRecurrentTransformerConfig(TransformerConfig):
    """A Block-Recurrent Transformer; the segment is its block, and what a token sees."""

    n_states: int = 512
    """State vectors of the recurrent layer."""
    gate: str = "fixed"
    """How the state changes after a block: "fixed", or "lstm"."""
    recurrent_layer: int | None = None
    """Which layer is recurrent, the first being 1; 10 of 12, as published, in proportion, if None."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, n_states=self.n_states)
        require_choice(GATES, gate=self.gate)
        exists = 1 <= self.number_of_recurrent_layer <= self.n_layer
        require(exists, "recurrent_layer", self.recurrent_layer, f"one of the {self.n_layer} layers, from 1")

    @property
    def number_of_recurrent_layer(self) -> int:
        """Which layer is recurrent, the first being 1."""
        return max(1, round(self.n_layer * 10 / 12)) if self.recurrent_layer is None else self.recurrent_layer


class BlockRecurrentTransformerState(NamedTuple):
    """One state per layer, in the layers' order; the recurrent layer's has the state vectors too."""

    layers: tuple[RelativeAttentionState | BlockRecurrentAttentionState, ...]


@register_model("block-recurrent-transformer", config=BlockRecurrentTransformerConfig)
class BlockRecurrentTransformer(AdaptiveShell):
    """Transformer-XL with a sliding window, one of whose layers reads and writes state vectors once a block.

    Every token sees the last segment_length tokens, in every layer, with relative positions (the paper has T5's biases
    instead of Transformer-XL's). No gradient flows into tokens before the open block; through the state vectors
    gradients flow until the caller detaches the state.

    Args:
        config: the model's shape; d_model must be even.
    """

    state_class = BlockRecurrentTransformerState

    def __init__(self, config: BlockRecurrentTransformerConfig) -> None:
        super().__init__(config)
        layers = range(1, config.n_layer + 1)
        self.encoding_dropout = make_dropout(config)
        self.blocks = nn.ModuleList(make_block(config, self._make_attention(number)) for number in layers)
        self.head = self._make_head()
        self.blocks.apply(initialise)
        if config.tie_embeddings:
            self.head.tie_tables(self.embedding)

    def _make_attention(self, number: int) -> RelativeAttention:
        config = self.config
        shared = {
            "n_heads": config.n_heads,
            "d_head": config.d_head,
            "segment_length": config.segment_length,
            "dropout": config.attention_dropout,
        }
        if number == config.number_of_recurrent_layer:
            return BlockRecurrentAttention(config.d_model, n_states=config.n_states, gate=config.gate, **shared)
        return RelativeAttention(config.d_model, mem_len=config.segment_length, same_length=True, **shared)

    def body(
        self, x: Float[Tensor, "B L d_model"], state: BlockRecurrentTransformerState | None, **lengths: Tensor
    ) -> tuple[Float[Tensor, "B L d_model"], BlockRecurrentTransformerState]:
        """Run the layers, which share the encoding of distances."""
        layers = (self._start(x) if state is None else self._entering(state, x)).layers
        first = cast(RelativeAttention, self.attentions[0])
        first.require_state(layers[0], len(x))  # before its lengths are read
        encoding = self.encoding_dropout(first.encode(x, of_tokens(layers[0]))[None])[0]
        following = []
        for block, layer in zip(self.blocks, layers):
            x, layer = block(x, layer, encoding=encoding)
            following.append(layer)
        return self.output_dropout(x), BlockRecurrentTransformerState(tuple(following))

    def _start(self, x: Tensor) -> BlockRecurrentTransformerState:
        return BlockRecurrentTransformerState(self._layers(len(x)))
