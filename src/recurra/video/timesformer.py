"""The shell of a model that reads clips, and TimeSformer (Bertasius et al., arXiv 2102.05095)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.checks import choose, kind_of, require_layout, require_tensor, sentence
from recurra.layers.embeddings import require_targets
from recurra.models.registry import VideoSizes, register_model
from recurra.models.shell import negative_log_likelihood
from recurra.video._space_time import (
    ENCODERS,
    NORM_EPS,
    SegmentEmbedding,
    VideoTransformerConfig,
    initialise,
    require_clip,
)

_HINT = "pass the state that this model returned for these streams (`recurra.state.select` picks streams out)"


class VideoModel(nn.Module, ABC):
    """A model of clips, which are streams of segments of `n_frames` frames: it gives the logits after each segment.

    A model writes `read` and `start`.

    Args:
        config: the model's shape.
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
    def start(self, batch: int, like: Tensor) -> Any:
        """Return the state of `batch` streams at their start, with the dtype and the device of `like`."""

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

    def initial_state(self, batch: int) -> Any:
        """Return the state of `batch` streams at their start, on the model's device and in float32 or better."""
        weight = self.embedding.class_token
        return self.start(batch, weight.new_empty(0, dtype=torch.promote_types(weight.dtype, torch.float32)))

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
    """A TimeSformer; the defaults are the published ones, on ViT-B/16."""

    attention: str = "divided"
    """Attention over space and time: "divided", time and then space in each block; "joint", both at once; or "space",
    each frame by itself, averaged at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("attention", ENCODERS, self.attention)


class TimeSformerState(NamedTuple):
    """Empty: each segment is classified by itself."""


@register_model("timesformer", config=TimeSformerConfig, reads=VideoSizes)
class TimeSformer(VideoModel):
    """Patch, position and time embeddings, blocks, a final norm, and a linear classifier on the class token.

    Each segment of `n_frames` frames is classified by itself.

    Args:
        config: the model's shape.
    """

    config: TimeSformerConfig

    def __init__(self, config: TimeSformerConfig) -> None:
        super().__init__(config)
        self.encoder = ENCODERS[config.attention](config)
        self.norm = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.head_dropout = nn.Dropout(config.head_dropout)
        self.head = nn.Linear(config.d_model, config.n_classes)
        self.apply(initialise)

    def start(self, batch: int, like: Tensor) -> TimeSformerState:
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
