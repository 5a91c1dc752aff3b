"""TimeSformer: a vision Transformer with attention over space and time (Bertasius et al., arXiv 2102.05095)."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from recurra.models.likelihood import PlainLikelihood
from recurra.models.space_time import ENCODERS, SegmentEmbedding
from recurra.models.space_time_blocks import NORM_EPS, initialise
from recurra.models.transformer_shape import require_choices
from recurra.models.video_shape import VideoTransformerConfig, VideoTransformerShape, require_clip


@dataclass(kw_only=True)
class TimeSformerShape(VideoTransformerShape):
    """The shape of a TimeSformer but for what the data give; the defaults are the published ViT-B/16 model's."""

    attention: str = "divided"
    """How attention goes over space and time: "divided", time then space in every block; "joint", both at once; or
    "space", every frame alone, the mean taken at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choices(self, {"attention": ENCODERS})


@dataclass(kw_only=True)
class TimeSformerConfig(TimeSformerShape, VideoTransformerConfig):
    """A TimeSformer; the defaults are the published model's over 8 frames of 224 pixels."""


class TimeSformerState(NamedTuple):
    """Nothing: every segment is looked at by itself."""


class TimeSformer(PlainLikelihood):
    """Patch, position and time embeddings, blocks, a final norm, and a linear classifier on the class token.

    A clip is a stream of segments of `n_frames` frames, each classified by itself.

    Args:
        config: the model's shape.
    """

    def __init__(self, config: TimeSformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = SegmentEmbedding(config)
        self.encoder = ENCODERS[config.attention](config)
        self.norm = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.head_dropout = nn.Dropout(config.head_dropout)
        self.head = nn.Linear(config.d_model, config.n_classes)
        self.apply(initialise)

    def forward(
        self, clip: Float[Tensor, "B T C H W"], state: TimeSformerState | None = None
    ) -> tuple[Float[Tensor, "B S n_classes"], TimeSformerState]:
        """Give the logits of every segment.

        Args:
            clip: normalised frames, a whole number S >= 1 of segments.
            state: what the segments before left, which is nothing; None is the start of a stream.

        Raises:
            ValueError: the frames are of another size, or no whole number of segments.
        """
        require_clip(clip, self.config)
        segments = clip.unflatten(1, (-1, self.config.n_frames))
        tokens = self.encoder(*self.embedding(segments.flatten(0, 1)))
        logits = self.head(self.head_dropout(self.norm(tokens[:, 0])))
        return logits.unflatten(0, segments.shape[:2]), TimeSformerState()
