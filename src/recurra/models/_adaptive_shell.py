"""The base class of Transformers with adaptive embeddings and softmax.

Its block is Transformer-XL's, post-norm as published or pre-norm, around any attention `(x, state) -> (y, state)`.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.checks import choose, kind_of, require_at_least, require_probability, sentence
from recurra.layers.attention import AttentionWindow
from recurra.layers.dropout import DROPOUTS, WordDropout
from recurra.layers.embeddings import AdaptiveEmbedding, Clusters
from recurra.layers.feed_forward import LinearWeights
from recurra.layers.softmax import AdaptiveSoftmax
from recurra.mixers.base import Mixer
from recurra.mixers.relative_attention import RelativeAttention
from recurra.models.registry import ModelConfig, Size, from_data
from recurra.models.shell import LanguageModelShell, require_layers
from recurra.state import Ragged, require_streams


class TransformerXLBlock(nn.Module):
    """Attention and a feed-forward network with ReLU, with a norm and a dropout for each.

    Args:
        attention: `(x, state) -> (y, state)`.
        d_channel_mixing: hidden channels of the feed-forward network.
        make_dropout: makes each dropout.
        norm: the norms' place, one of `_NORMS`. "pre in attention" has a memory of x itself (the published
            `pre_lnorm`): the attention applies the norm to memory and segment together, so that the norm's weights get
            gradients from both.
    """

    def __init__(
        self, attention: nn.Module, d_channel_mixing: int, make_dropout: Callable[[], nn.Module], norm: str
    ) -> None:
        super().__init__()
        d_model = cast(int, attention.d_model)
        self.attention, self._norm = attention, norm
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

    def forward(
        self, x: Float[Tensor, "B L d_model"], state: Any = None, **shared: Any
    ) -> tuple[Float[Tensor, "B L d_model"], Any]:
        entering = self.norm_attention(x) if self._norm == "pre" else x
        if self._norm == "pre in attention":
            shared["norm"] = self.norm_attention
        attended, state = self.attention(entering, state, **shared)
        x = x + self.dropout(attended)
        if self._norm == "post":
            x = self.norm_attention(x)
            return self.norm_feed_forward(x + self.feed_forward(x)), state
        return x + self.feed_forward(self.norm_feed_forward(x)), state


_NORMS = {
    "post": "x = LayerNorm(x + Attention(x)); x = LayerNorm(x + FFN(x)) (Transformer-XL, section 3.3)",
    "pre": "x = x + Attention(LayerNorm(x)); x = x + FFN(LayerNorm(x))",
}


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """A Transformer's stack; the defaults are the published 16-layer WikiText-103 models', without cutoffs.

    Raises ValueError, naming the field, for an impossible value.
    """

    vocab_size: Size = from_data()
    """Vocabulary size; null: that of the data."""
    segment_length: Size = from_data()
    """Tokens of a segment; null: as in the data. Segments begin at multiples of it, wherever a stream is cut."""
    n_layer: int = 16
    """Blocks."""
    d_model: int = 410
    """Channels of the residual stream."""
    n_heads: int = 10
    """Heads of the attention."""
    d_head: int | None = None
    """Channels of a head; d_model / n_heads if None."""
    d_channel_mixing: int = 2100
    """Hidden channels of the feed-forward networks."""
    norm: str = "post"
    """Position of the norms in the blocks: "post", as published, or "pre"."""
    cutoffs: list[int] = field(default_factory=list)
    """Ends of the adaptive softmax's clusters, for a vocabulary sorted by frequency; empty for a plain softmax."""
    tie_embeddings: bool = True
    """Use the embedding's tables as the output's."""
    dropout: float = 0.1
    """Probability of dropping an activation: of the blocks, of what enters and leaves them unless `input_dropout` and
    `output_dropout` say otherwise, and in Transformer-XL and the Block-Recurrent Transformer of position encodings."""
    input_dropout: float | None = None
    """Probability of dropping a channel of the embedding; `dropout` if None."""
    output_dropout: float | None = None
    """Probability of dropping a channel of the output layer's input; `dropout` if None."""
    dropout_over_time: str = "independent"
    """How those masks vary over the steps of a call: "independent", or "locked", one mask for all (variational). Blocks
    that are called once for each segment, as those of CRT and RMT, draw one for each segment."""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight."""
    embedding_dropout: float = 0.0
    """Probability of dropping a word everywhere in a call."""

    @property
    def entering_dropout(self) -> float:
        return self.dropout if self.input_dropout is None else self.input_dropout

    @property
    def leaving_dropout(self) -> float:
        return self.dropout if self.output_dropout is None else self.output_dropout

    def __post_init__(self) -> None:
        require_at_least(
            1,
            n_layer=self.n_layer,
            d_model=self.d_model,
            n_heads=self.n_heads,
            d_channel_mixing=self.d_channel_mixing,
        )
        require_probability(
            dropout=self.dropout,
            input_dropout=self.entering_dropout,
            output_dropout=self.leaving_dropout,
            attention_dropout=self.attention_dropout,
            embedding_dropout=self.embedding_dropout,
        )
        choose("norm", _NORMS, self.norm)
        choose("dropout_over_time", DROPOUTS, self.dropout_over_time)
        if self.segment_length is not None:
            AttentionWindow(self.segment_length, mem_len=0)
        if self.vocab_size is not None:
            Clusters(self.vocab_size, self.d_model, tuple(self.cutoffs), 1)


class AdaptiveShell(LanguageModelShell):
    """What Transformer-XL, CRT and the Recurrent Memory Transformer share around their bodies.

    `loss` computes the logits of a target's cluster only. A model makes its parts in the order in which their weights
    are drawn: the embedding, the model's own parts, and `_make_stack`.
    """

    forms_logits: ClassVar[bool] = False
    state_class: ClassVar[type]
    """The NamedTuple that is the model's state; its field `layers` has one state per block."""
    embedding: AdaptiveEmbedding
    head: AdaptiveSoftmax

    def __init__(self, config: Any, **vocabulary: Any) -> None:
        super().__init__()
        config.require_sizes()
        self.config = config
        self._vocabulary = {"cutoffs": config.cutoffs, **vocabulary}
        self.embedding = AdaptiveEmbedding(config.vocab_size, config.d_model, **self._vocabulary)
        self.word_dropout = WordDropout(config.vocab_size, config.embedding_dropout)
        self.input_dropout = make_dropout(config, config.entering_dropout)
        self.output_dropout = make_dropout(config, config.leaving_dropout)

    def _make_head(self) -> AdaptiveSoftmax:
        return AdaptiveSoftmax(self.config.vocab_size, self.config.d_model, **self._vocabulary)

    def _make_stack(self, attentions: Iterable[Mixer]) -> None:
        """Make a block for each attention, and the head."""
        self.blocks = nn.ModuleList(make_block(self.config, attention) for attention in attentions)
        self.head = self._make_head()
        self.blocks.apply(initialise)
        if self.config.tie_embeddings:
            self.head.tie_tables(self.embedding)

    @property
    def attentions(self) -> list[Mixer]:
        return [cast(Mixer, block.attention) for block in self.blocks]

    def enter(self, x: Float[Tensor, "B L d_model"], tokens: Tensor | None = None) -> Tensor:
        """Drop words and channels in training; vectors that are no token's are not dropped as words."""
        entered: Tensor = self.input_dropout(x if tokens is None else self.word_dropout(x, tokens))
        return entered

    def losses(self, hidden: Float[Tensor, "B L d_model"], targets: Int[Tensor, "B L"]) -> Float[Tensor, "B L"]:
        losses: Tensor = self.head.loss(hidden.flatten(0, 1), targets.flatten())
        return losses.view_as(targets)

    def initial_state(self, batch: int) -> Any:
        return self._start(torch.empty(batch, 0, self.config.d_model, **self._like()))

    def require_state(self, state: Any, batch: int) -> None:
        """Check the model's own part of the state, and that of every layer."""
        if isinstance(state, Ragged):
            require_streams(self.require_state, state, batch)
            return
        self._checked_state(state, torch.empty(batch, 0, self.config.d_model, **self._like()))
        for attention, layer in zip(self.attentions, state.layers):
            attention.require_state(layer, batch)

    def _like(self) -> dict[str, Any]:
        weight = next(self.parameters())
        return {"dtype": weight.dtype, "device": weight.device}

    def _layers(self, batch: int) -> tuple[Any, ...]:
        return tuple(attention.initial_state(batch) for attention in self.attentions)

    @abstractmethod
    def _start(self, x: Tensor) -> Any:
        """Return the state at the start of the streams of x, (B, L, d_model)."""

    def _checked_state(self, state: Any, x: Tensor) -> Any:
        """Check the model's own part of a state that continues with x; the layers check theirs."""
        require_layers(state, self.state_class, len(self.blocks))
        return state


class EncodedShell(AdaptiveShell):
    """A shell whose layers, all of relative attention, share the encoding of distances."""

    encoding_dropout: nn.Module

    def body(
        self, x: Float[Tensor, "B L d_model"], state: Any, **options: Any
    ) -> tuple[Float[Tensor, "B L d_model"], Any]:
        layers = (self._start(x) if state is None else self._checked_state(state, x)).layers
        first = cast(RelativeAttention, self.attentions[0])
        first.require_state(layers[0], len(x))  # before its lengths are read
        encoding = self.encoding_dropout(first.encode(x, layers[0])[None])[0]
        x, next_layers = self.run_blocks(x, layers, encoding=encoding, **options)
        return self.output_dropout(x), self.state_class(next_layers)

    def _start(self, x: Tensor) -> Any:
        return self.state_class(self._layers(len(x)))


def require_position(position: Any, segment_length: int) -> None:
    """Refuse anything but a place in a segment. Raises ValueError."""
    if not isinstance(position, int) or not 0 <= position < segment_length:
        got = position if isinstance(position, int) else kind_of(position)
        raise ValueError(sentence("state.position", got, f"a number from 0 to {segment_length - 1}"))


def make_dropout(config: TransformerConfig, p: float | None = None) -> nn.Module:
    """Make a dropout over activations, as the shape says; at its own rate, or at another."""
    return DROPOUTS[config.dropout_over_time](config.dropout if p is None else p)


def make_block(config: TransformerConfig, attention: Mixer, norm: str | None = None) -> nn.Module:
    return TransformerXLBlock(
        attention, config.d_channel_mixing, lambda: make_dropout(config), config.norm if norm is None else norm
    )


def initialise(module: nn.Module) -> None:
    """Draw as Transformer-XL's published code does; embedding, softmax and attention biases are drawn when made."""
    if isinstance(module, (nn.Linear, LinearWeights)):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight, mean=1.0, std=0.02)
        nn.init.zeros_(module.bias)


def draw_biases(module: nn.Module) -> None:
    """Draw the biases of a linear layer as torch does by default, not as zeros.

    With zero biases a stream's first memory, zero, stays zero in every layer, and the gradient of a layer norm at 0 is
    about 300 times what comes in, twice a layer.
    """
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.uniform_(module.bias, -(module.in_features**-0.5), module.in_features**-0.5)
