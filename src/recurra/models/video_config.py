"""What the configurations of the Transformers that read clips share, and a check of clips."""

from dataclasses import dataclass

from torch import Tensor

from recurra.checks import (
    kind_of,
    require,
    require_at_least,
    require_heads,
    require_probability,
    require_tensor,
    sentence,
)
from recurra.models.registry import ModelConfig, Size, from_data


@dataclass(frozen=True, kw_only=True)
class VideoTransformerConfig(ModelConfig):
    """A vision Transformer over clips; the defaults are those of the published ViT-B/16.

    Raises ValueError, naming the field, for an impossible value.
    """

    n_classes: Size = from_data()
    """Classes; null: as many as the data have."""
    n_frames: Size = from_data()
    """Frames in a segment; null: as in the data."""
    image_size: Size = from_data()
    """Pixels of a frame's edge, frames being square; null: as in the data."""
    patch_size: int = 16
    """Edge of a patch in pixels; it must divide the edge of a frame."""
    n_channels: int = 3
    """Colour channels of a pixel."""
    n_layer: int = 12
    """Number of blocks."""
    d_model: int = 768
    """Channels of the residual stream."""
    n_heads: int = 12
    """Attention heads; they must divide d_model."""
    d_channel_mixing: int = 3072
    """Hidden channels of the feed-forward networks."""
    dropout: float = 0.0
    """Probability of dropping an activation, in the embeddings and after the layers of the blocks."""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight."""
    drop_path: float = 0.1
    """Probability of dropping what a part of a block adds (stochastic depth): this value in the last block, rising
    linearly from 0 in the first."""
    head_dropout: float = 0.0
    """Probability of dropping a channel of the classifier's input."""

    def __post_init__(self) -> None:
        require_at_least(1, patch_size=self.patch_size, n_channels=self.n_channels, n_layer=self.n_layer)
        require_at_least(1, d_channel_mixing=self.d_channel_mixing)
        require_heads(self.n_heads, d_model=self.d_model)
        require_probability(dropout=self.dropout, attention_dropout=self.attention_dropout)
        require_probability(drop_path=self.drop_path, head_dropout=self.head_dropout)
        sizes = self.given_sizes()
        require_at_least(1, **sizes)
        if (image_size := sizes.get("image_size")) is not None:
            divides = image_size % self.patch_size == 0
            require(divides, "patch_size", self.patch_size, f"a divisor of image_size = {image_size}")

    @property
    def n_patches(self) -> int:
        """Number of patches in a frame."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def drop_paths(self) -> list[float]:
        """The probability of stochastic depth in each block."""
        return [self.drop_path * block / max(1, self.n_layer - 1) for block in range(self.n_layer)]


def require_clip(clip: Tensor, config: VideoTransformerConfig) -> None:
    """Refuse a clip that is not (B, T, C, H, W) with frames of the model's size and a whole number of its segments.

    Raises:
        TypeError: the clip is not a tensor.
        ValueError: naming what came and what was expected.
    """
    require_tensor("clip", clip)
    channels, edge = config.n_channels, config.image_size
    if clip.dim() != 5 or tuple(clip.shape[2:]) != (channels, edge, edge):
        mend = f"the model reads frames of {channels} channels and image_size = {edge}"
        raise ValueError(sentence("clip", kind_of(clip), f"(batch, frames, {channels}, {edge}, {edge})", mend))
    if not clip.is_floating_point():
        raise ValueError(sentence("clip", kind_of(clip), "a floating-point type", "normalise the frames"))
    n_frames = clip.shape[1]
    if not n_frames or n_frames % config.n_frames:
        expected = f"one or more whole segments of n_frames = {config.n_frames}"
        raise ValueError(sentence("clip", f"{n_frames} frames long", expected))
