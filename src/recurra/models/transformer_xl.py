"""Transformer-XL (Dai et al., arXiv 1901.02860); without memory, the Transformer over single segments."""

from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import nn

from recurra.checks import require, require_at_least
from recurra.layers.attention import AttentionWindow
from recurra.layers.embeddings import Clusters
from recurra.mixers.relative_attention import (
    PreNormRelativeAttention,
    RelativeAttention,
    RelativeAttentionState,
)
from recurra.models._adaptive_shell import (
    EncodedShell,
    TransformerConfig,
    initialise,
    make_block,
    make_dropout,
)
from recurra.models.registry import register_model

_LENGTHS = ("segment_length", "mem_len", "same_length", "clamp_len")


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(TransformerConfig):
    """A Transformer-XL; the defaults are the published 151M model's, without its cutoffs. d_model must be even."""

    mem_len: int | None = None
    """Hidden states of earlier segments that a segment sees; 0 gives the Transformer over single segments, None as many
    as a segment has steps."""
    same_length: bool = False
    """Every step sees the last mem_len steps, itself included, not the whole memory and its segment."""
    clamp_len: int | None = None
    """Larger distances are encoded as this one; None for no limit."""
    share_biases: bool = True
    """Share one pair of attention biases u and v between all layers, as published, instead of one pair per layer."""
    d_embedding: int | None = None
    """Channels of the embedding's first cluster; d_model if None."""
    div_val: int = 1
    """Divides the channels of the embedding from cluster to cluster."""
    tie_projections: list[bool] | None = None
    """For every cluster: use the embedding's projection as the output's; all but the first, as published, if None.
    It matters if there are projections: with another d_embedding than d_model, or a div_val above 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mem_len is None and self.segment_length is not None:
            object.__setattr__(self, "mem_len", self.segment_length)
        if self.segment_length is None:
            AttentionWindow(1, 1 if self.mem_len is None else self.mem_len, self.same_length, self.clamp_len)
        else:
            self.window  # noqa: B018 - checks the lengths
        if self.d_embedding is not None:
            require_at_least(1, d_embedding=self.d_embedding)
        n_clusters = 1 + len(self.cutoffs)
        fits = self.tie_projections is None or len(self.tie_projections) == n_clusters
        require(fits, "tie_projections", self.tie_projections, f"one entry for each of the {n_clusters} clusters")
        if self.vocab_size is not None:
            Clusters(self.vocab_size, self.d_embedding or self.d_model, tuple(self.cutoffs), self.div_val)

    @property
    def window(self) -> AttentionWindow:
        """What a step sees."""
        return AttentionWindow(*(getattr(self, name) for name in _LENGTHS))

    @property
    def tied_projections(self) -> list[bool]:
        """Which projections are tied, for every cluster."""
        return self.tie_projections or [False] + [True] * len(self.cutoffs)


class TransformerXLState(NamedTuple):
    """One state per block, in the blocks' order."""

    layers: tuple[RelativeAttentionState, ...]


@register_model("transformer-xl", config=TransformerXLConfig)
class TransformerXL(EncodedShell):
    """Adaptive embedding, blocks of relative attention with a memory of hidden states, adaptive softmax.

    In the published code, training feeds one segment at once. Here, segments depend on the position in the stream: they
    begin at multiples of `segment_length`. Within a segment, the caller decides whether gradients flow between calls;
    no gradient flows into the memory (section 3.2). With whole segments, the results equal the published code's.
    """

    state_class = TransformerXLState

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config, d_embedding=config.d_embedding, div_val=config.div_val)
        self.encoding_dropout = make_dropout(config)
        self.blocks = nn.ModuleList(_make_block(config) for _ in range(config.n_layer))
        self.head = self._make_head()
        self.apply(initialise)
        if config.share_biases:
            first, *others = cast(list[RelativeAttention], self.attentions)
            for attention in others:
                attention.content_bias, attention.position_bias = first.content_bias, first.position_bias
        if config.tie_embeddings:
            self.head.tie_tables(self.embedding)
        self.head.tie_projections(self.embedding, config.tied_projections)

    @property
    def kind(self) -> str:
        """The model of the paper's tables; without a memory it is the Transformer."""
        return "Transformer-XL" if self.config.mem_len else "Transformer"

    @property
    def published_row(self) -> str | None:
        """The formula knows a memory as long as a segment, or none."""
        return self.kind if self.config.mem_len in (0, self.config.segment_length) else None


def _make_block(config: TransformerXLConfig) -> nn.Module:
    options = {
        "n_heads": config.n_heads,
        "d_head": config.d_head,
        "dropout": config.attention_dropout,
        **{name: getattr(config, name) for name in _LENGTHS},
    }
    if config.norm == "post":
        return make_block(config, RelativeAttention(config.d_model, **options))
    return make_block(config, PreNormRelativeAttention(config.d_model, **options), "pre in attention")
