"""Models as a recipe describes them: everything but the sizes that the data give."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import nn

from recurra.checks import fields_of, require_at_least, require_probability
from recurra.models import (
    CompactRecurrentTransformer,
    CompactRecurrentTransformerConfig,
    CompactRecurrentTransformerShape,
    CompactRecurrentViT,
    CompactRecurrentViTConfig,
    CompactRecurrentViTShape,
    LanguageModel,
    LanguageModelConfig,
    TimeSformer,
    TimeSformerConfig,
    TimeSformerShape,
    TransformerXL,
    TransformerXLConfig,
    TransformerXLShape,
)


class DataSizes(NamedTuple):
    """What a model takes from its data.

    vocab_size: how many values an input may take. output_size: how many a target may take.
    segment_length: steps of a segment, for models that read segments; None where the data have none.
    """

    vocab_size: int
    output_size: int
    segment_length: int | None = None


class VideoSizes(NamedTuple):
    """What a model takes from its data where these are videos.

    n_classes: how many there are to tell apart. n_frames: frames of a segment. image_size: pixels of a frame's edge.
    """

    n_classes: int
    n_frames: int
    image_size: int


@runtime_checkable
class ModelRecipe(Protocol):
    """What builds a model once its data are known."""

    def build(self, sizes: Any) -> nn.Module:
        """Make the model with fresh weights.

        Args:
            sizes: the data's, of the kind that the model takes: `DataSizes` or `VideoSizes`.
        """
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
    phase_activation, ring, output_gate. Where mixer is a list: the options of each mixer by its name."""
    tie_embeddings: bool = False
    """Use the token embedding as the output head too."""
    dropout: float = 0.0
    """Share of activations that are dropped in training, in [0, 1)."""

    def __post_init__(self) -> None:
        require_at_least(1, **fields_of(self, "model", "n_layer", "d_model", "d_channel_mixing"))
        require_probability(**fields_of(self, "model", "dropout"))

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


@dataclass(kw_only=True)
class StartingWeights:
    """What recipes of video models say besides the shape: where the weights come from."""

    init_from: str | None = None
    """Start from these weights instead of fresh ones: a run's folder (its best checkpoint), a checkpoint, the published
    weights of TimeSformer (.pyth), or a Hugging Face folder or file of it. Embeddings of other sizes are interpolated,
    and other classes get a fresh classifier. A run that is resumed goes on with its own."""


@dataclass(kw_only=True)
class TimeSformerRecipe(TimeSformerShape, StartingWeights):
    """A TimeSformer; classes, frames of a segment and pixels are the data's."""

    def build(self, sizes: VideoSizes) -> TimeSformer:
        """Make the model with fresh weights."""
        return TimeSformer(TimeSformerConfig(**sizes._asdict(), **_shape(self, TimeSformerShape)))


@dataclass(kw_only=True)
class CompactRecurrentViTRecipe(CompactRecurrentViTShape, StartingWeights):
    """A compact recurrent vision Transformer; classes, frames of a segment and pixels are the data's."""

    def build(self, sizes: VideoSizes) -> CompactRecurrentViT:
        """Make the model with fresh weights."""
        config = CompactRecurrentViTConfig(**sizes._asdict(), **_shape(self, CompactRecurrentViTShape))
        return CompactRecurrentViT(config)


def _shape(recipe: object, shape: type) -> dict[str, Any]:
    return {field.name: getattr(recipe, field.name) for field in fields(shape)}
