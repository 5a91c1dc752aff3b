"""What the Transformers that read clips have in common: sizes, dropouts, and what they take for a clip."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(kw_only=True)
class VideoTransformerShape:
    """The shape of a vision Transformer over clips; the defaults are those of the published ViT-B/16.

    Raises ValueError, naming the field, for a value that cannot be.
    """

    patch_size: int = 16
    """Pixels of a patch's edge; it must divide the edge of a frame."""
    n_channels: int = 3
    """Colours of a pixel."""
    n_layer: int = 12
    """Blocks."""
    d_model: int = 768
    """Channels of the residual stream."""
    n_heads: int = 12
    """Heads of the attention; they must divide d_model."""
    d_channel_mixing: int = 3072
    """Hidden channels of the feed-forward networks."""
    dropout: float = 0.0
    """Probability of dropping an activation: of the embeddings, and after the layers of the blocks."""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight."""
    drop_path: float = 0.1
    """Probability of dropping what a part of the last block adds (stochastic depth); it rises linearly from 0 in the
    first block."""
    head_dropout: float = 0.0
    """Probability of dropping a channel of what the classifier reads."""

    def __post_init__(self) -> None:
        _require_positive(self, "patch_size", "n_channels", "n_layer", "d_model", "n_heads", "d_channel_mixing")
        for name in ("dropout", "attention_dropout", "drop_path", "head_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected a probability from 0 up to, not including, 1"
                )
        if self.d_model % self.n_heads:
            raise ValueError(f"n_heads is {self.n_heads}; it must divide d_model = {self.d_model}")


@dataclass(kw_only=True)
class VideoTransformerConfig(VideoTransformerShape):
    """A shape with the sizes that the data give."""

    n_classes: int
    """Classes told apart."""
    n_frames: int = 8
    """Frames of a segment."""
    image_size: int = 224
    """Pixels of a frame's edge; frames are square."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "n_classes", "n_frames", "image_size")
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size is {self.patch_size}; it must divide image_size = {self.image_size}")

    @property
    def n_patches(self) -> int:
        """Patches of a frame."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def drop_paths(self) -> list[float]:
        """The probability of stochastic depth in every block."""
        return [self.drop_path * block / max(1, self.n_layer - 1) for block in range(self.n_layer)]


def require_clip(clip: Tensor, config: VideoTransformerConfig) -> None:
    """Refuse a clip that is not (B, T, C, H, W) with frames of the model's size and T a whole number of its segments.

    Raises:
        ValueError: saying what came and what was expected.
    """
    frame = (config.n_channels, config.image_size, config.image_size)
    if clip.dim() != 5 or tuple(clip.shape[2:]) != frame:
        raise ValueError(
            f"clip is of shape {tuple(clip.shape)}; expected (batch, frames, {', '.join(map(str, frame))}), for frames "
            f"of {config.n_channels} channels and image_size = {config.image_size}"
        )
    if not clip.shape[1] or clip.shape[1] % config.n_frames:
        raise ValueError(
            f"clip has {clip.shape[1]} frames; expected one or more whole segments of n_frames = {config.n_frames}"
        )


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; expected at least 1")
