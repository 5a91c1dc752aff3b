"""TimeSformer (Bertasius et al., arXiv 2102.05095), its parts, and the shell of a model that reads clips."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.checks import (
    kind_of,
    require,
    require_at_least,
    require_heads,
    require_layout,
    require_numbers,
    require_probability,
    require_tensor,
    sentence,
)
from recurra.layers.attention import SelfAttention
from recurra.layers.dropout import DropPath
from recurra.layers.embeddings import require_targets
from recurra.layers.feed_forward import FeedForward
from recurra.models.registry import ModelConfig, Size, VideoSizes, from_data, register_model
from recurra.models.shell import negative_log_likelihood

NORM_EPS = 1e-6
"""The epsilon of each layer norm, as in the published code."""
_HINT = "pass the state that this model returned for these streams (`recurra.state.select` picks streams out)"


class _PatchEmbedding(nn.Module):
    """Cut images into square patches and project each linearly."""

    def __init__(self, n_channels: int, patch_size: int, d_model: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(n_channels, d_model, patch_size, stride=patch_size)

    def forward(self, images: Float[Tensor, "N C H W"]) -> Float[Tensor, "N P d_model"]:
        """Embed the patches of each image, line by line from the top left."""
        return self.projection(images).flatten(2).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class VideoTransformerConfig(ModelConfig):
    """A vision Transformer over clips; the defaults are those of the published ViT-B/16."""

    n_classes: Size = from_data()
    """Number of classes; null: as in the data."""
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
    """Refuse a clip that is not (B, T, C, H, W) with frames of the model's size and a whole number of its segments."""
    require_tensor("clip", clip)
    channels, edge = config.n_channels, config.image_size
    if clip.dim() != 5 or tuple(clip.shape[2:]) != (channels, edge, edge):
        hint = f"the model reads frames of {channels} channels and image_size = {edge}"
        raise ValueError(sentence("clip", kind_of(clip), f"(batch, frames, {channels}, {edge}, {edge})", hint))
    if not clip.is_floating_point():
        raise ValueError(sentence("clip", kind_of(clip), "a floating-point type", "normalise the frames"))
    n_frames = clip.shape[1]
    if not n_frames or n_frames % config.n_frames:
        expected = f"one or more whole segments of n_frames = {config.n_frames}"
        raise ValueError(sentence("clip", f"{n_frames} frames long", expected))


class DividedBlock(nn.Module):
    """Divided space-time attention (Bertasius et al. (10)-(11)): time, then space, then the feed-forward network.

    Time attention runs over the frames of each patch position, space attention over the class token and the patches of
    each frame; the class token's update is averaged over the frames. A linear layer follows time attention. It starts
    as zeros, so that a new model sees each frame by itself, like an image model. The published code means to except the
    first block (`i > 0`), but counts the list of blocks as one, so that all blocks start with zeros.

    Args:
        config: the model's shape.
        drop_path: probability of dropping what a part adds: to a patch position in time attention, to a frame in space
            attention, to a whole sequence in the feed-forward network, as in the published code.
    """

    time_attention_kind: ClassVar[type[SelfAttention]] = SelfAttention

    def __init__(self, config: VideoTransformerConfig, drop_path: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.attention = _make_attention(SelfAttention, config)
        self.norm_feed_forward = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.feed_forward = FeedForward(config.d_model, config.d_channel_mixing, config.dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = DropPath(drop_path)
        self.n_frames = config.n_frames
        self.norm_time = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.time_attention = _make_attention(self.time_attention_kind, config)
        self.time_projection = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Float[Tensor, "N tokens d_model"]) -> Float[Tensor, "N tokens d_model"]:
        """Apply the block."""
        normed = self.norm_time(self._by_patch(x))
        return self._after_time(x, self.time_attention(normed.flatten(0, 1)))

    def _by_patch(self, x: Tensor) -> Tensor:
        """Return all tokens except the class token as (N, P, T, d_model)."""
        return x[:, 1:].unflatten(1, (-1, self.n_frames))

    def _after_time(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the output of time attention for each patch position, (N * P, T, d_model), then finish the block."""
        patches = self._by_patch(x)
        patches = patches + self.time_projection(self.drop_path(attended).unflatten(0, patches.shape[:2]))
        class_token = x[:, :1]
        update, updates = self._mix_space(class_token, patches)
        x = torch.cat([class_token + update, (patches + updates).flatten(1, 2)], 1)
        return x + self.drop_path(self.dropout(self.feed_forward(self.norm_feed_forward(x))))

    def _mix_space(self, class_token: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Return the updates from space attention: class token (N, 1, d_model) and patches (N, P, T, d_model)."""
        n_sequences = patches.shape[0]
        repeated = self.norm_attention(class_token)[:, None].expand(-1, self.n_frames, -1, -1)
        frames = torch.cat([repeated, self.norm_attention(patches).transpose(1, 2)], 2).flatten(0, 1)
        updates = self.drop_path(self.attention(frames)).unflatten(0, (n_sequences, self.n_frames))
        return updates[:, :, 0].mean(1, keepdim=True), updates[:, :, 1:].transpose(1, 2)


def _make_attention(kind: type[SelfAttention], config: VideoTransformerConfig) -> SelfAttention:
    return kind(
        config.d_model, n_heads=config.n_heads, attention_dropout=config.attention_dropout, dropout=config.dropout
    )


def initialise(module: nn.Module) -> None:
    """Initialise as the published code does."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    if isinstance(module, DividedBlock):  # after its parts, which `apply` visits first
        nn.init.zeros_(module.time_projection.weight)
        nn.init.zeros_(module.time_projection.bias)


class SegmentEmbedding(nn.Module):
    """Patches with an embedding of their position in the frame, and a learned class token with its own."""

    def __init__(self, config: VideoTransformerConfig) -> None:
        super().__init__()
        self.patches = _PatchEmbedding(config.n_channels, config.patch_size, config.d_model)
        self.class_token = nn.Parameter(torch.empty(config.d_model))
        self.positions = nn.Parameter(torch.empty(1 + config.n_patches, config.d_model))
        self.dropout = nn.Dropout(config.dropout)
        for parameter in (self.class_token, self.positions):
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(
        self, frames: Float[Tensor, "N T C H W"]
    ) -> tuple[Float[Tensor, "N d_model"], Float[Tensor, "N P T d_model"]]:
        """Return the class token and the patches of each segment."""
        patches = self.patches(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).transpose(1, 2)
        class_token = (self.class_token + self.positions[0]).expand(frames.shape[0], -1)
        return self.dropout(class_token), self.dropout(patches + self.positions[1:, None])


class DividedEncoder(nn.Module):
    """An embedding of time added to each patch, then blocks over the class token and the patches of all frames."""

    block: ClassVar[type[nn.Module]] = DividedBlock

    def __init__(self, config: VideoTransformerConfig) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.zeros(config.n_frames, config.d_model))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.block(config, p) for p in config.drop_paths)

    def forward(
        self, class_token: Float[Tensor, "N d_model"], patches: Float[Tensor, "N P T d_model"], *shared: Tensor
    ) -> Float[Tensor, "N tokens d_model"]:
        """Return the tokens after the last block, the class token first; each block also gets `shared`."""
        x = self.with_times(class_token, patches)
        for block in self.blocks:
            x = block(x, *shared)
        return x

    def with_times(
        self, class_token: Float[Tensor, "N d_model"], patches: Float[Tensor, "N P T d_model"]
    ) -> Float[Tensor, "N tokens d_model"]:
        """Return the tokens before the first block: the class token, and the patches with the embedding of time."""
        return torch.cat([class_token[:, None], self.dropout(patches + self.times).flatten(1, 2)], 1)


class VideoModel(nn.Module, ABC):
    """A model of clips, which are streams of segments of `n_frames` frames: it gives the logits after each segment.

    Subclasses define `read` and `initial_state`.
    """

    forms_logits: ClassVar[bool] = True
    """Whether `loss` forms the logits of all classes, so that predictions and accuracy cost nothing more."""
    learns_from_poses: ClassVar[bool] = False
    """Whether `loss` takes poses, which need no more than training."""

    def __init__(self, config: VideoTransformerConfig) -> None:
        super().__init__()
        config.require_sizes()
        self.config = config
        self.embedding = SegmentEmbedding(config)

    @abstractmethod
    def read(self, segments: Float[Tensor, "B S T C H W"], state: Any) -> tuple[Float[Tensor, "B S n_classes"], Any]:
        """Return the logits after each of S >= 1 segments, and the next state."""

    @abstractmethod
    def initial_state(self, batch: int) -> Any:
        """Return the state of `batch` streams at their start, on the model's device and in float32 or better."""

    def forward(
        self, clip: Float[Tensor, "B T C H W"], state: Any = None
    ) -> tuple[Float[Tensor, "B S n_classes"], Any]:
        """Return the logits after each segment, continuing from `state`.

        Args:
            clip: normalised frames, a whole number S >= 1 of segments.
            state: the state after the previous segments; None starts a stream. The streams of a batch may be at
                different positions.
        """
        require_clip(clip, self.config)
        require_numbers("clip", clip, self.embedding.class_token)
        if state is None:
            state = self.initial_state(clip.shape[0])
        else:
            self.require_state(state, clip.shape[0])
        return self.read(clip.unflatten(1, (-1, self.config.n_frames)), state)

    def loss(
        self, clip: Float[Tensor, "B T C H W"], targets: Int[Tensor, "B S"], state: Any = None
    ) -> tuple[Float[Tensor, "B S"], Any]:
        """Return the negative log-likelihood of each segment's class in nats, continuing from `state`.

        Args:
            clip, state: as `forward`.
            targets: the class of each segment; `IGNORED_TARGET` gives 0.
        """
        logits, state = self(clip, state)
        require_targets(targets, logits.shape[:2])
        return negative_log_likelihood(logits, targets), state

    def require_state(self, state: Any, batch: int) -> None:
        """Refuse anything but a state of `batch` streams that this model could have returned."""
        expected = self.initial_state(batch)
        if type(state) is not type(expected):
            expected_kind = f"a {type(expected).__name__}, or None to start a stream"
            raise TypeError(sentence("state", kind_of(state), expected_kind, _HINT))
        for name, tensor, like in zip(expected._fields, state, expected):
            require_tensor(f"state.{name}", tensor)
            require_layout(f"state.{name}", tensor, like.shape, like.dtype, like.device, _HINT)


@dataclass(frozen=True, kw_only=True)
class TimeSformerConfig(VideoTransformerConfig):
    """A TimeSformer with divided space-time attention; the defaults are the published ones, on ViT-B/16."""


class TimeSformerState(NamedTuple):
    """Empty: each segment is classified by itself."""


@register_model("timesformer", config=TimeSformerConfig, reads=VideoSizes)
class TimeSformer(VideoModel):
    """Patch, position and time embeddings, blocks, a final norm, and a linear classifier on the class token.

    Each segment of `n_frames` frames is classified by itself.
    """

    config: TimeSformerConfig

    def __init__(self, config: TimeSformerConfig) -> None:
        super().__init__(config)
        self.encoder = DividedEncoder(config)
        self.norm = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.head_dropout = nn.Dropout(config.head_dropout)
        self.head = nn.Linear(config.d_model, config.n_classes)
        self.apply(initialise)

    def initial_state(self, batch: int) -> TimeSformerState:
        """Return the empty state."""
        return TimeSformerState()

    def read(
        self, segments: Float[Tensor, "B S T C H W"], state: TimeSformerState
    ) -> tuple[Float[Tensor, "B S n_classes"], TimeSformerState]:
        """Return the logits of each segment."""
        tokens = self.encoder(*self.embedding(segments.flatten(0, 1)))
        return self.classify(tokens).unflatten(0, segments.shape[:2]), state

    def classify(self, tokens: Float[Tensor, "N tokens d_model"]) -> Float[Tensor, "N n_classes"]:
        """Return the logits for the tokens after the last block."""
        return self.head(self.head_dropout(self.norm(tokens[:, 0])))
