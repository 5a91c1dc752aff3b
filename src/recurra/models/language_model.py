"""The recurrent language model: tokens in, logits out, any registered mixer in between (GateLoop App. C, Figure 10)."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from recurra.layers.transition import Transition
from recurra.layers.vocabulary import counted_tokens
from recurra.lengths.packed import on_host
from recurra.lengths.padded import blank, check_lengths
from recurra.mixers import create_mixer
from recurra.models.block import Block
from recurra.models.likelihood import PlainLikelihood


@dataclass
class LanguageModelConfig:
    """The shape of a language model."""

    vocab_size: int
    """Input tokens."""
    output_size: int | None = None
    """Output tokens; `vocab_size` when None."""
    n_layer: int = 4
    """Blocks."""
    d_model: int = 64
    """Channels of the residual stream."""
    d_channel_mixing: int = 128
    """Hidden channels of the feed-forward networks."""
    mixer: str | list[str] = "gateloop"
    """The time mixing layer by its registered name, one for all blocks or one per block."""
    mixer_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the mixer; where `mixer` is a list, those of each mixer by its name."""
    tie_embeddings: bool = False
    """Use the token embedding as the output matrix, too."""
    dropout: float = 0.0
    """Probability of dropping a channel of the embedding and of what each half of a block adds."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layer", "d_model", "d_channel_mixing"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.output_size is not None and self.output_size < 1:
            raise ValueError(f"output_size is {self.output_size}; expected at least 1, or nothing for vocab_size")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; expected a probability from 0 up to, not including, 1")
        if not isinstance(self.mixer, str) and len(self.mixer) != self.n_layer:
            raise ValueError(f"mixer names {len(self.mixer)} layers and n_layer is {self.n_layer}; name one for each")
        if not isinstance(self.mixer, str):
            for name, options in self.mixer_options.items():
                if name not in self.mixer or not isinstance(options, dict):
                    raise ValueError(
                        f"mixer_options has {name}: {options!r}; where mixer is a list, it holds the options of each "
                        f"by name, and the names are {', '.join(dict.fromkeys(self.mixer))}"
                    )
        if self.tie_embeddings and self.output_size not in (None, self.vocab_size):
            raise ValueError(
                f"tie_embeddings asks for as many output as input tokens; output_size is {self.output_size} and "
                f"vocab_size {self.vocab_size}"
            )

    @property
    def mixers(self) -> list[tuple[str, dict[str, Any]]]:
        """The mixer's name and options for every block."""
        if isinstance(self.mixer, str):
            return [(self.mixer, self.mixer_options)] * self.n_layer
        return [(name, self.mixer_options.get(name, {})) for name in self.mixer]


class LanguageModelState(NamedTuple):
    """One state per block, in the blocks' order."""

    layers: tuple[Any, ...]


class LanguageModel(PlainLikelihood):
    """Embedding without positional encoding, blocks, a final norm and a linear head.

    Weights are drawn from N(0, 1 / fan-in) and biases start at 0 (our choice; the paper does not say).

    Args:
        config: the model's shape.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(
                create_mixer(name, config.d_model, **options),
                config.d_model,
                config.d_channel_mixing,
                config.dropout,
            )
            for name, options in config.mixers
        )
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.output_size or config.vocab_size, bias=not config.tie_embeddings)
        self.apply(_initialise)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Int[Tensor, "B L"],
        state: LanguageModelState | None = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
    ) -> tuple[Float[Tensor, "B L output"], LanguageModelState]:
        """Give the logits after every token, going on from `state`; None is the start of a stream.

        Args:
            tokens: what the model reads.
            state: what the steps before left; None is the start of a stream.
            mask: True where a token counts; the others change nothing, and their logits are zeros. They must be in the
                vocabulary all the same, or `IGNORED_TARGET`.
            cu_seqlens: the borders of N sequences, packed end to end in tokens (1, T); the state is of batch N.

        Raises:
            IndexError: a token is not in the vocabulary (raised by the embedding).
            TypeError, ValueError: the mask or the borders do not fit the tokens, or both are given.
        """
        hidden, state = self.hidden(tokens, state, mask=mask, cu_seqlens=cu_seqlens)
        return blank(self.head(hidden), mask), state

    def hidden(
        self,
        tokens: Int[Tensor, "B L"],
        state: LanguageModelState | None = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
    ) -> tuple[Float[Tensor, "B L d_model"], LanguageModelState]:
        """Give the final norm's output after every token, which the head reads; arguments as `forward`."""
        if cu_seqlens is not None:
            cu_seqlens = on_host(cu_seqlens)  # once, not in every block
        check_lengths(tokens, mask, cu_seqlens)
        layers = [None] * len(self.blocks) if state is None else state.layers
        x = self.dropout(self.embedding(counted_tokens(tokens, mask, self.config.vocab_size)))
        next_layers = []
        for block, layer_state in zip(self.blocks, layers):
            x, layer_state = block(x, layer_state, mask=mask, cu_seqlens=cu_seqlens)
            next_layers.append(layer_state)
        return blank(self.norm(x), mask), LanguageModelState(tuple(next_layers))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
    elif isinstance(module, Transition):
        module.place_on_ring()  # its projection came first
