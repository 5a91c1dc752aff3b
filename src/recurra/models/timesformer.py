"""TimeSformer: a vision Transformer with attention over space and time (Bertasius et al., arXiv 2102.05095)."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require_choice
from recurra.models.registry import VideoSizes, register_model
from recurra.models.space_time import ENCODERS
from recurra.models.space_time_blocks import NORM_EPS, initialise
from recurra.models.video_config import VideoTransformerConfig
from recurra.models.video_model import VideoModel


@dataclass(frozen=True, kw_only=True)
class TimeSformerConfig(VideoTransformerConfig):
    """A TimeSformer; the defaults are the published ones, on ViT-B/16."""

    attention: str = "divided"
    """Attention over space and time: "divided", time and then space in each block; "joint", both at once; or "space",
    each frame by itself, averaged at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(ENCODERS, attention=self.attention)


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
