"""Models as recipes describe them: shapes that build, and the weights to start from."""

from dataclasses import dataclass, make_dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from recurra.models import CompactRecurrentViTShape, LanguageModelShape, ModelEntry, PIViTShape, TimeSformerShape


@runtime_checkable
class ModelRecipe(Protocol):
    """A config that builds a model once the sizes of its data are known: the shape of any registered model."""

    def build(self, sizes: Any) -> nn.Module:
        """Make the model with fresh weights.

        Args:
            sizes: the sizes of the data: `DataSizes` or `VideoSizes`, whichever the model takes.
        """
        ...


@dataclass(kw_only=True)
class StartingLanguageModel:
    """What recipes of language models have beside the shape: the weights to start from."""

    init_from: str | None = None
    """Start from these weights instead of fresh ones: the folder of a run (its best checkpoint), a checkpoint, a
    .safetensors file of ours, or a folder of a published model. Shape and vocabulary must be the recipe's; dropouts may
    differ. A resumed run continues with its own weights."""


@dataclass(kw_only=True)
class LanguageModelRecipe(LanguageModelShape, StartingLanguageModel):
    """A recurrent language model; its vocabulary comes from the data."""


def language_model_recipe(entry: ModelEntry) -> type[Any]:
    """Make what recipes say of a registered language model: its shape, and the weights to start from."""
    kind = make_dataclass(f"{entry.label}Recipe", [], bases=(entry.shape, StartingLanguageModel), kw_only=True)
    kind.__doc__ = entry.shape.__doc__
    kind.__module__ = __name__
    return kind


@dataclass(kw_only=True)
class StartingWeights:
    """What recipes of video models have beside the shape: the weights to start from."""

    init_from: str | None = None
    """Start from these weights instead of fresh ones: the folder of a run (its best checkpoint), a checkpoint, the
    published weights of TimeSformer (.pyth), or a Hugging Face folder or file. Embeddings of other sizes are
    interpolated; for other classes the classifier is fresh. A resumed run continues with its own weights."""


@dataclass(kw_only=True)
class TimeSformerRecipe(TimeSformerShape, StartingWeights):
    """A TimeSformer; classes, frames of a segment and pixels come from the data."""


@dataclass(kw_only=True)
class PIViTRecipe(PIViTShape, StartingWeights):
    """A PI-ViT; classes, frames of a segment and pixels come from the data."""


@dataclass(kw_only=True)
class CompactRecurrentViTRecipe(CompactRecurrentViTShape, StartingWeights):
    """A compact recurrent vision Transformer; classes, frames of a segment and pixels come from the data."""
