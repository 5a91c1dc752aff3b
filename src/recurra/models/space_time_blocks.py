"""The blocks of TimeSformer (Bertasius et al., arXiv 2102.05095): attention over all tokens, or time first, then space.

The tokens of a segment form one sequence: the class token, then all frames of the first patch position, of the second
and so on, so that time attention needs no rearrangement.
"""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.layers.drop_path import DropPath
from recurra.layers.feed_forward import FeedForward
from recurra.layers.self_attention import SelfAttention
from recurra.models.video_config import VideoTransformerConfig

NORM_EPS = 1e-6
"""The epsilon of each layer norm, as in the published code."""


class TransformerBlock(nn.Module):
    """x = x + Attention(LayerNorm(x)); x = x + FFN(LayerNorm(x)), with attention between all tokens of a sequence.

    Args:
        config: the model's shape.
        drop_path: probability of dropping what a part adds to a sequence.
    """

    def __init__(self, config: VideoTransformerConfig, drop_path: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.attention = _make_attention(SelfAttention, config)
        self.norm_feed_forward = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.feed_forward = FeedForward(config.d_model, config.d_channel_mixing, config.dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Float[Tensor, "N tokens d_model"]) -> Float[Tensor, "N tokens d_model"]:
        """Apply the block."""
        return self.mix_channels(x + self.drop_path(self.attention(self.norm_attention(x))))

    def mix_channels(self, x: Float[Tensor, "N tokens d_model"]) -> Float[Tensor, "N tokens d_model"]:
        """Apply the half with the feed-forward network."""
        return x + self.drop_path(self.dropout(self.feed_forward(self.norm_feed_forward(x))))


class DividedBlock(TransformerBlock):
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
        super().__init__(config, drop_path)
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
        return self.mix_channels(torch.cat([class_token + update, (patches + updates).flatten(1, 2)], 1))

    def _mix_space(self, class_token: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Return the updates from space attention: class token (N, 1, d_model) and patches (N, P, T, d_model)."""
        n_sequences = patches.shape[0]
        repeated = self.norm_attention(class_token)[:, None].expand(-1, self.n_frames, -1, -1)
        frames = torch.cat([repeated, self.norm_attention(patches).transpose(1, 2)], 2).flatten(0, 1)
        updates = self.drop_path(self.attention(frames)).unflatten(0, (n_sequences, self.n_frames))
        return updates[:, :, 0].mean(1, keepdim=True), updates[:, :, 1:].transpose(1, 2)


def _make_attention(kind: type[SelfAttention], config: VideoTransformerConfig) -> SelfAttention:
    return kind(
        config.d_model,
        n_heads=config.n_heads,
        attention_dropout=config.attention_dropout,
        dropout=config.dropout,
    )


def initialise(module: nn.Module) -> None:
    """Initialise as the published code does: linear layers from N(0, 0.02^2), biases zero; use with `nn.Module.apply`.

    The convolution keeps torch's initialisation, and the projections after time attention are set to zero.
    """
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    if isinstance(module, DividedBlock):  # after its parts, which `apply` visits first
        nn.init.zeros_(module.time_projection.weight)
        nn.init.zeros_(module.time_projection.bias)
