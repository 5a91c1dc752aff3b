"""Transformer-XL (Dai et al., arXiv 1901.02860); without memory, the Transformer over single segments."""

import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from recurra.layers.adaptive_embedding import AdaptiveEmbedding
from recurra.layers.adaptive_softmax import AdaptiveSoftmax
from recurra.layers.attention_window import AttentionWindow
from recurra.layers.dropout import DROPOUTS, WordDropout
from recurra.layers.vocabulary import Clusters, counted_targets, counted_tokens
from recurra.lengths.padded import blank, check_lengths, in_pieces
from recurra.mixers.relative_attention import RelativeAttention, RelativeAttentionState
from recurra.models.transformer_shape import TransformerShape
from recurra.models.transformer_xl_block import TRANSFORMER_XL_BLOCKS
from recurra.state import Rows

_LENGTHS = ("segment_length", "mem_len", "same_length", "clamp_len")


@dataclass(kw_only=True)
class TransformerXLShape(TransformerShape):
    """The shape of a Transformer-XL but for its vocabulary and its segments; d_model must be even."""

    mem_len: int | None = None
    """Hidden states of earlier segments that a segment sees; 0 gives the Transformer over single segments, None as many
    as a segment has steps."""
    same_length: bool = False
    """Every step sees the last mem_len steps, itself included, not the whole memory and its segment."""
    clamp_len: int | None = None
    """Larger distances are encoded as this one; None for no limit."""
    share_biases: bool = True
    """One pair of attention biases u and v for all layers, as published, not one per layer."""
    d_embedding: int | None = None
    """Channels of the embedding's first cluster; d_model when None."""
    div_val: int = 1
    """What the channels of the embedding are divided by from cluster to cluster."""
    tie_projections: list[bool] | None = None
    """For every cluster: use the embedding's projection as the output's; all but the first, as published, when None.
    It matters where there are projections: with a d_embedding of its own, or a div_val above 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        AttentionWindow(1, 1 if self.mem_len is None else self.mem_len, self.same_length, self.clamp_len)
        if self.tie_projections is not None and len(self.tie_projections) != 1 + len(self.cutoffs):
            raise ValueError(
                f"tie_projections has {len(self.tie_projections)} entries; expected one for each of the "
                f"{1 + len(self.cutoffs)} clusters"
            )


@dataclass(kw_only=True)
class TransformerXLConfig(TransformerXLShape):
    """A Transformer-XL; the defaults are the published 151M parameter model's, less its cutoffs."""

    vocab_size: int
    """Tokens, read and predicted."""
    segment_length: int = 150
    """Steps of a segment. Segments begin at the multiples of it, however a stream is cut."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mem_len = self.segment_length if self.mem_len is None else self.mem_len
        self.window  # noqa: B018 - checks the lengths
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


class TransformerXL(nn.Module):
    """Adaptive embedding, blocks of relative attention with a memory of hidden states, adaptive softmax.

    The segment, which training feeds at once in the published code, is a matter of the position in the stream here: it
    begins at the multiples of `segment_length`. Within a segment gradients flow from call to call as the caller wants;
    into the memory none flow (section 3.2). Fed whole segments, the model computes what the published code does.

    Args:
        config: the model's shape.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.config = config
        vocabulary: dict[str, Any] = {
            "cutoffs": config.cutoffs,
            "d_embedding": config.d_embedding,
            "div_val": config.div_val,
        }
        self.embedding = AdaptiveEmbedding(config.vocab_size, config.d_model, **vocabulary)
        self.word_dropout = WordDropout(config.vocab_size, config.embedding_dropout)
        self.dropout = _make_dropout(config)
        self.blocks = nn.ModuleList(_make_block(config) for _ in range(config.n_layer))
        self.head = AdaptiveSoftmax(config.vocab_size, config.d_model, **vocabulary)
        self.apply(_initialise)
        if config.share_biases:
            first, *others = self.attentions
            for attention in others:
                attention.content_bias, attention.position_bias = first.content_bias, first.position_bias
        if config.tie_embeddings:
            self.head.tie_tables(self.embedding)
        self.head.tie_projections(self.embedding, config.tied_projections)

    @property
    def attentions(self) -> list[RelativeAttention]:
        """The attention of every block."""
        return [cast(RelativeAttention, block.attention) for block in self.blocks]

    def forward(
        self,
        tokens: Int[Tensor, "B L"],
        state: TransformerXLState | Rows | None = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
    ) -> tuple[Float[Tensor, "B L vocabulary"], TransformerXLState | Rows]:
        """Give the logits after every token, going on from `state`; None is the start of a stream.

        With cutoffs they are log-probabilities, in float32 also under autocast; without, the softmax's plain logits.

        Args:
            tokens: what the model reads.
            state: what the steps before left; None is the start of a stream.
            mask: True where a token counts; the others change nothing, and their logits are zeros. They must be in the
                vocabulary all the same, or `IGNORED_TARGET`. Rows then stand at different places of their segments, and
                the state is `Rows`.
            cu_seqlens: the borders of N sequences, packed end to end in tokens (1, T); the state is of batch N.

        Raises:
            IndexError: a token is not in the vocabulary.
            TypeError, ValueError: the mask or the borders do not fit the tokens, or both are given.
        """
        hidden, state = self.hidden(tokens, state, mask=mask, cu_seqlens=cu_seqlens)
        return blank(self.head(hidden), mask), state

    def loss(
        self,
        tokens: Int[Tensor, "B L"],
        targets: Int[Tensor, "B L"],
        state: TransformerXLState | Rows | None = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
    ) -> tuple[Float[Tensor, "B L"], TransformerXLState | Rows]:
        """Give the negative log-likelihood of every target in nats, without the logits of the whole vocabulary.

        Args:
            tokens: what the model reads.
            targets: what should come after each; `IGNORED_TARGET` gives 0.
            state: what the steps before left; None is the start of a stream.
            mask, cu_seqlens: as `forward`; what does not count has a loss of 0.

        Raises:
            IndexError: a token or a target is not in the vocabulary.
            TypeError, ValueError: the mask or the borders do not fit the tokens, or both are given.
        """
        hidden, state = self.hidden(tokens, state, mask=mask, cu_seqlens=cu_seqlens)
        targets = counted_targets(targets, mask)
        return self.head.loss(hidden.flatten(0, 1), targets.flatten()).view_as(targets), state

    def hidden(
        self,
        tokens: Int[Tensor, "B L"],
        state: TransformerXLState | Rows | None = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
    ) -> tuple[Float[Tensor, "B L d_model"], TransformerXLState | Rows]:
        """Give the last block's output after every token, which the softmax reads; arguments as `forward`."""
        if mask is not None or cu_seqlens is not None or isinstance(state, Rows):
            check_lengths(tokens, mask, cu_seqlens)
            tokens = counted_tokens(tokens, mask, self.config.vocab_size)
            return in_pieces(self.hidden, tokens, state, mask=mask, cu_seqlens=cu_seqlens)
        layers = [None] * len(self.blocks) if state is None else state.layers
        x = self.dropout(self.word_dropout(self.embedding(tokens), tokens))
        encoding = self.dropout(self.attentions[0].encode(x, layers[0])[None])[0]
        next_layers = []
        for block, layer_state in zip(self.blocks, layers):
            x, layer_state = block(x, layer_state, encoding)
            next_layers.append(layer_state)
        return self.dropout(x), TransformerXLState(tuple(next_layers))

    def with_lengths(self, **lengths: Any) -> "TransformerXL":
        """Give the same model, its weights shared, with other lengths: evaluation often wants a longer memory.

        Its states are its own: start streams anew.

        Args:
            lengths: any of `segment_length`, `mem_len`, `same_length`, `clamp_len`; the others stay.

        Raises:
            TypeError: another name.
            ValueError: a length is out of range.
        """
        if unknown := [name for name in lengths if name not in _LENGTHS]:
            raise TypeError(f"{', '.join(unknown)} cannot be changed; the lengths are {', '.join(_LENGTHS)}")
        config = replace(self.config, **lengths)
        twin = copy.deepcopy(self, {id(tensor): tensor for tensor in self.parameters()})
        twin.config = config
        for attention in twin.attentions:
            attention.window = config.window
        return twin


def _make_dropout(config: TransformerXLConfig) -> nn.Module:
    return DROPOUTS[config.dropout_over_time](config.dropout)


def _make_block(config: TransformerXLConfig) -> nn.Module:
    attention = RelativeAttention(
        config.d_model,
        n_heads=config.n_heads,
        d_head=config.d_head,
        dropout=config.attention_dropout,
        **{name: getattr(config, name) for name in _LENGTHS},
    )
    return TRANSFORMER_XL_BLOCKS[config.norm](attention, config.d_channel_mixing, lambda: _make_dropout(config))


def _initialise(module: nn.Module) -> None:
    """Draw as the published code does; embedding, softmax and attention biases are drawn where they are made."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight, mean=1.0, std=0.02)
        nn.init.zeros_(module.bias)
