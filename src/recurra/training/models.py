"""Models as recipes describe them: shapes that build, and for videos the weights to start from."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from recurra.models import CompactRecurrentViTShape, TimeSformerShape


@runtime_checkable
class ModelRecipe(Protocol):
    """What builds a model once its data are known: the shape of any registered model."""

    def build(self, sizes: Any) -> nn.Module:
        """Make the model with fresh weights.

        Args:
            sizes: the data's, of the kind that the model takes: `DataSizes` or `VideoSizes`.
        """
        ...


@dataclass(kw_only=True)
class StartingWeights:
    """What recipes of video models say besides the shape: where the weights come from."""

    init_from: str | None = None
    """Start from these weights instead of fresh ones: a run's folder (its best checkpoint), a checkpoint, the published
    weights of TimeSformer (.pyth), or a Hugging Face folder or file of it. Embeddings of other sizes are interpolated,
    and other classes get a fresh classifier. A resumed run continues with its own weights."""


@dataclass(kw_only=True)
class TimeSformerRecipe(TimeSformerShape, StartingWeights):
    """A TimeSformer; classes, frames of a segment and pixels come from the data."""


@dataclass(kw_only=True)
class CompactRecurrentViTRecipe(CompactRecurrentViTShape, StartingWeights):
    """A compact recurrent vision Transformer; classes, frames of a segment and pixels come from the data."""
