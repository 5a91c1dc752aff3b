"""Models as a recipe describes them: everything but the sizes that the data give."""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import nn

from recurra.models import (
    CompactRecurrentTransformer,
    CompactRecurrentTransformerConfig,
    CompactRecurrentTransformerShape,
    LanguageModel,
    LanguageModelConfig,
    TransformerXL,
    TransformerXLConfig,
    TransformerXLShape,
)
from recurra.training.config import require


class DataSizes(NamedTuple):
    """What a model takes from its data.

    vocab_size: how many values an input may take. output_size: how many a target may take.
    segment_length: steps of a segment, for models that read segments; None where the data have none.
    """

    vocab_size: int
    output_size: int
    segment_length: int | None = None


@runtime_checkable
class ModelRecipe(Protocol):
    """What builds a model once its data are known."""

    def build(self, sizes: DataSizes) -> nn.Module:
        """Make the model with fresh weights."""
        ...


@dataclass
class ModelConfig:
    """A recurrent language model; how many tokens it reads and predicts is the data's business."""

    n_layer: int = 4
    """Blocks, each a time mixing and a channel mixing layer."""
    d_model: int = 64
    """Channels between the layers."""
    d_channel_mixing: int = 128
    """Channels inside a feed-forward layer."""
    mixer: str | list[str] = "gateloop"
    """The time mixing layer of all blocks, or one name for each; `recurra info` lists them."""
    mixer_options: dict[str, Any] = field(default_factory=dict)
    """Options of the time mixing layer; for gateloop: d_qk, d_v, n_heads, transition, magnitude_activation,
    phase_activation, output_gate. Where mixer is a list: the options of each mixer by its name."""
    tie_embeddings: bool = False
    """Use the token embedding as the output head too."""
    dropout: float = 0.0
    """Share of activations that are dropped in training, in [0, 1)."""

    def __post_init__(self) -> None:
        for name in ("n_layer", "d_model", "d_channel_mixing"):
            value = getattr(self, name)
            require(value >= 1, f"model.{name}", "1 or more", value)
        require(0 <= self.dropout < 1, "model.dropout", "in [0, 1)", self.dropout)

    def build(self, sizes: DataSizes) -> LanguageModel:
        """Make the model with fresh weights."""
        config = LanguageModelConfig(vocab_size=sizes.vocab_size, output_size=sizes.output_size, **vars(self))
        return LanguageModel(config)


@dataclass(kw_only=True)
class TransformerXLRecipe(TransformerXLShape):
    """A Transformer-XL; its segments are the data's."""

    def build(self, sizes: DataSizes) -> TransformerXL:
        """Make the model with fresh weights."""
        return TransformerXL(TransformerXLConfig(**_segmented(sizes), **asdict(self)))


@dataclass(kw_only=True)
class CompactRecurrentTransformerRecipe(CompactRecurrentTransformerShape):
    """A Compact Recurrent Transformer; its segments are the data's."""

    def build(self, sizes: DataSizes) -> CompactRecurrentTransformer:
        """Make the model with fresh weights."""
        return CompactRecurrentTransformer(CompactRecurrentTransformerConfig(**_segmented(sizes), **asdict(self)))


def _segmented(sizes: DataSizes) -> dict[str, Any]:
    if sizes.segment_length is None:
        raise ValueError("the model reads segments, and the data have none")
    return {"vocab_size": sizes.vocab_size, "segment_length": sizes.segment_length}
