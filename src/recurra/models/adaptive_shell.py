"""The shell with an adaptive embedding and an adaptive softmax, around a body that reads segments."""

from abc import abstractmethod
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.checks import kind_of, sentence
from recurra.layers.adaptive_embedding import AdaptiveEmbedding
from recurra.layers.adaptive_softmax import AdaptiveSoftmax
from recurra.layers.dropout import DROPOUTS, WordDropout
from recurra.mixers.base import Mixer
from recurra.models.shell import LanguageModelShell, require_layers
from recurra.models.transformer_config import TransformerConfig
from recurra.models.transformer_xl_block import TRANSFORMER_XL_BLOCKS
from recurra.state import Ragged, require_streams


class AdaptiveShell(LanguageModelShell):
    """What Transformer-XL, CRT and the Recurrent Memory Transformer share around their bodies.

    `loss` forms the logits of a target's cluster alone. A model makes its parts in the order in which its weights are
    drawn: `_make_embedding`, its own, blocks by `_make_block`, `_make_head`.
    """

    forms_logits: ClassVar[bool] = False
    state_class: ClassVar[type]
    """The NamedTuple that is the model's state; its field `layers` has one state per block."""
    embedding: AdaptiveEmbedding
    head: AdaptiveSoftmax
    blocks: nn.ModuleList

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

    @property
    def attentions(self) -> list[Mixer]:
        """The attention of every block."""
        return [cast(Mixer, block.attention) for block in self.blocks]

    def embed(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L d_model"]:
        """Look tokens up; words and channels are dropped in training."""
        x: Tensor = self.input_dropout(self.word_dropout(self.embedding(tokens), tokens))
        return x

    def losses(self, hidden: Float[Tensor, "B L d_model"], targets: Int[Tensor, "B L"]) -> Float[Tensor, "B L"]:
        """Ask the adaptive softmax, without the logits of the whole vocabulary."""
        losses: Tensor = self.head.loss(hidden.flatten(0, 1), targets.flatten())
        return losses.view_as(targets)

    def initial_state(self, batch: int) -> Any:
        """Return the state at the start of a stream."""
        return self._start(torch.empty(batch, 0, self.config.d_model, **self._like()))

    def require_state(self, state: Any, batch: int) -> None:
        """Check the model's own part of the state, and that of every layer."""
        if isinstance(state, Ragged):
            require_streams(self.require_state, state, batch)
            return
        self._entering(state, torch.empty(batch, 0, self.config.d_model, **self._like()))
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

    def _entering(self, state: Any, x: Tensor) -> Any:
        """Check the model's own part of a state that continues with x; the layers check theirs."""
        require_layers(state, self.state_class, len(self.blocks))
        return state


def require_position(position: Any, segment_length: int) -> None:
    """Refuse anything but a place in a segment. Raises ValueError."""
    if not isinstance(position, int) or not 0 <= position < segment_length:
        came = position if isinstance(position, int) else kind_of(position)
        raise ValueError(sentence("state.position", came, f"a number from 0 to {segment_length - 1}"))


def make_dropout(config: TransformerConfig, p: float | None = None) -> nn.Module:
    """Make a dropout over activations, as the shape says; at its own rate, or at another."""
    return DROPOUTS[config.dropout_over_time](config.dropout if p is None else p)


def make_block(config: TransformerConfig, attention: Mixer) -> nn.Module:
    """Put an attention into a block, as the shape says."""
    return TRANSFORMER_XL_BLOCKS[config.norm](attention, config.d_channel_mixing, lambda: make_dropout(config))


def initialise(module: nn.Module) -> None:
    """Draw as Transformer-XL's published code does; embedding, softmax and attention biases are drawn when made."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight, mean=1.0, std=0.02)
        nn.init.zeros_(module.bias)


def draw_biases(module: nn.Module) -> None:
    """Draw the biases of a linear layer as torch does by default, not as zeros.

    A stream's first memory is zero, and with zero biases it stays exactly zero in every layer. The gradient of a layer
    norm at 0 is about 300 times what comes in, twice a layer: 16 layers overflow.
    """
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.uniform_(module.bias, -(module.in_features**-0.5), module.in_features**-0.5)
