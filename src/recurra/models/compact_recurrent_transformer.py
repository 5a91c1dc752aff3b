"""The Compact Recurrent Transformer (CRT): short segments, and one memory vector between them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from recurra.layers.adaptive_embedding import AdaptiveEmbedding
from recurra.layers.adaptive_softmax import AdaptiveSoftmax
from recurra.layers.attention_window import AttentionWindow
from recurra.layers.dropout import DROPOUTS, WordDropout
from recurra.layers.vocabulary import Clusters, counted_targets, counted_tokens
from recurra.lengths.padded import blank, check_lengths, in_pieces
from recurra.mixers.relative_attention import RelativeAttention
from recurra.mixers.rnn import cells_prepared_once
from recurra.mixers.segment_attention import SegmentAttention
from recurra.models.segment_memory import MEMORIES, POSITION_STARTS, POSITIONS, make_memory, make_position
from recurra.models.transformer_shape import TransformerShape, require_choices
from recurra.models.transformer_xl import _initialise
from recurra.models.transformer_xl_block import TRANSFORMER_XL_BLOCKS
from recurra.state import Rows


@dataclass(kw_only=True)
class CompactRecurrentTransformerShape(TransformerShape):
    """The shape of a CRT but for its vocabulary and its segments."""

    memory: str = "gru"
    """What is carried between segments: "none", or a vector kept by a "gru" or an "ncgru"."""
    position: str = "rnn-gru"
    """What gives the tokens their order: "relative" attention, or an RNN over the segment, "rnn-gru" or "rnn-ncgru"."""
    position_start: str = "memory"
    """Where the position RNN starts a segment: from the "memory" (zeros where there is none), or from "zero"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choices(self, {"memory": MEMORIES, "position": POSITIONS, "position_start": POSITION_STARTS})


@dataclass(kw_only=True)
class CompactRecurrentTransformerConfig(CompactRecurrentTransformerShape):
    """A CRT; the defaults are the sizes of the published 16-layer WikiText-103 models, less their cutoffs."""

    vocab_size: int
    """Tokens, read and predicted."""
    segment_length: int = 150
    """Tokens of a segment, the memory not counted. Segments begin at the multiples of it, however a stream is cut."""

    def __post_init__(self) -> None:
        super().__post_init__()
        AttentionWindow(self.segment_length, mem_len=0)
        Clusters(self.vocab_size, self.d_model, tuple(self.cutoffs), 1)


class CompactRecurrentTransformerState(NamedTuple):
    """What a stream leaves for its next step; never more than one segment.

    position: tokens of the open segment so far.
    memory: m, with which the open segment began, (B, d_model), or (B, 0) where there is none.
    reading: the memory RNN's state after the outputs of the open segment.
    placing: the position RNN's state after the tokens of the open segment.
    layers: the attention's keys and values of the open segment, one state per block.
    """

    position: int
    memory: Float[Tensor, "B m"]
    reading: Float[Tensor, "B m"]
    placing: Float[Tensor, "B p"]
    layers: tuple[Any, ...]


class CompactRecurrentTransformer(nn.Module):
    """Segments of n tokens through a Transformer, one persistent memory vector m between them (CRT section 3).

    For every segment: X = embeddings; E = position RNN over X; [m; E] enters the blocks, every one of which attends
    causally over memory and segment; the outputs y_1..y_n give the logits, and the memory RNN reads them, starting at
    m: its last state is the next m. The chain is never reset inside a stream, and gradients flow along it until the
    caller detaches the state.

    With `memory="none", position="relative"` it is the Transformer baseline; the other combinations are the ablations
    of the paper's Table 8.

    Args:
        config: the model's shape.
    """

    def __init__(self, config: CompactRecurrentTransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = AdaptiveEmbedding(config.vocab_size, config.d_model, cutoffs=config.cutoffs)
        self.word_dropout = WordDropout(config.vocab_size, config.embedding_dropout)
        self.dropout = DROPOUTS[config.dropout_over_time](config.dropout)
        self.memory = make_memory(config.memory, config.d_model)
        self.position = make_position(config.position, config.position_start, config.d_model)
        self.blocks = nn.ModuleList(self._make_block() for _ in range(config.n_layer))
        self.head = AdaptiveSoftmax(config.vocab_size, config.d_model, cutoffs=config.cutoffs)
        self.blocks.apply(_initialise)
        self.blocks.apply(_draw_biases)
        if config.tie_embeddings:
            self.head.tie_tables(self.embedding)
        self._window = AttentionWindow(config.segment_length, mem_len=0)

    def _make_block(self) -> nn.Module:
        config = self.config
        kind = RelativeAttention if config.position == "relative" else SegmentAttention
        options: dict[str, Any] = {"mem_len": 0} if config.position == "relative" else {}
        attention = kind(
            config.d_model,
            n_heads=config.n_heads,
            d_head=config.d_head,
            segment_length=config.segment_length + self.memory.n_tokens,
            dropout=config.attention_dropout,
            **options,
        )
        dropout = DROPOUTS[config.dropout_over_time]
        return TRANSFORMER_XL_BLOCKS[config.norm](attention, config.d_channel_mixing, lambda: dropout(config.dropout))

    def forward(
        self,
        tokens: Int[Tensor, "B L"],
        state: CompactRecurrentTransformerState | Rows | None = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
    ) -> tuple[Float[Tensor, "B L vocabulary"], CompactRecurrentTransformerState | Rows]:
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
        state: CompactRecurrentTransformerState | Rows | None = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
    ) -> tuple[Float[Tensor, "B L"], CompactRecurrentTransformerState | Rows]:
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
        state: CompactRecurrentTransformerState | Rows | None = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
    ) -> tuple[Float[Tensor, "B L d_model"], CompactRecurrentTransformerState | Rows]:
        """Give the last block's output after every token, which the softmax reads; arguments as `forward`."""
        if mask is not None or cu_seqlens is not None or isinstance(state, Rows):
            check_lengths(tokens, mask, cu_seqlens)
            tokens = counted_tokens(tokens, mask, self.config.vocab_size)
            return in_pieces(self.hidden, tokens, state, mask=mask, cu_seqlens=cu_seqlens)
        x = self.dropout(self.word_dropout(self.embedding(tokens), tokens))
        state = self._start(x) if state is None else state
        if not x.shape[1]:
            return x, state
        outputs = []
        with cells_prepared_once():
            for piece in x.split(self._window.pieces(x.shape[1], state.position), 1):
                y, state = self._within_segment(piece, state)
                outputs.append(y)
        return self.dropout(torch.cat(outputs, 1)), state

    def _start(self, x: Tensor) -> CompactRecurrentTransformerState:
        memory = self.memory.start(x)
        layers = (None,) * len(self.blocks)
        return CompactRecurrentTransformerState(0, memory, memory, self.position.start(memory), layers)

    def _within_segment(
        self, x: Tensor, state: CompactRecurrentTransformerState
    ) -> tuple[Tensor, CompactRecurrentTransformerState]:
        """Run tokens of one segment; the memory stands in front of the segment's first."""
        placed, placing = self.position(x, state.placing)
        inputs = placed if state.position else torch.cat([self.memory.tokens(state.memory, placed), placed], 1)
        layers = []
        for block, layer in zip(self.blocks, state.layers):
            inputs, layer = block(inputs, layer)
            layers.append(layer)
        y = inputs[:, inputs.shape[1] - x.shape[1] :]
        reading = self.memory.read(y, state.reading)
        position = state.position + x.shape[1]
        if position == self.config.segment_length:
            after = CompactRecurrentTransformerState(0, reading, reading, self.position.start(reading), tuple(layers))
        else:
            after = CompactRecurrentTransformerState(position, state.memory, reading, placing, tuple(layers))
        return y, after


def _draw_biases(module: nn.Module) -> None:
    """Draw the biases of a linear layer as torch does by default, not as zeros.

    A stream's first memory is zero, and with zero biases it stays exactly zero in every layer. The gradient of a layer
    norm at 0 is some 300 times what comes in, twice a layer: 16 layers overflow.
    """
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.uniform_(module.bias, -(module.in_features**-0.5), module.in_features**-0.5)
