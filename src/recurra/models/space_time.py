"""Embedding a segment's frames, and the encoders over its tokens (TimeSformer, arXiv 2102.05095, section 3)."""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.layers.patch_embedding import PatchEmbedding
from recurra.models.space_time_blocks import DividedBlock, TransformerBlock
from recurra.models.video_config import VideoTransformerConfig


class SegmentEmbedding(nn.Module):
    """Patches with an embedding of their position in the frame, and a learned class token with its own.

    Args:
        config: the model's shape.
    """

    def __init__(self, config: VideoTransformerConfig) -> None:
        super().__init__()
        self.patches = PatchEmbedding(config.n_channels, config.patch_size, config.d_model)
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


class SpaceTimeEncoder(nn.Module):
    """An embedding of time added to each patch, then blocks over the class token and the patches of all frames.

    Args:
        config: the model's shape.
    """

    block: ClassVar[type[TransformerBlock]]

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


class DividedEncoder(SpaceTimeEncoder):
    """Attention over time, then over space, in each block."""

    block = DividedBlock


class JointEncoder(SpaceTimeEncoder):
    """Attention over all patches of all frames at once."""

    block = TransformerBlock


class SpaceEncoder(nn.Module):
    """Each frame by itself, without a time embedding, and the mean of the tokens over frames after the last block.

    Args:
        config: the model's shape.
    """

    def __init__(self, config: VideoTransformerConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(config, p) for p in config.drop_paths)

    def forward(
        self, class_token: Float[Tensor, "N d_model"], patches: Float[Tensor, "N P T d_model"]
    ) -> Float[Tensor, "N tokens d_model"]:
        """Return the mean of the tokens over frames, the class token first."""
        n_frames = patches.shape[2]
        repeated = class_token[:, None, None].expand(-1, n_frames, -1, -1)
        x = torch.cat([repeated, patches.transpose(1, 2)], 2).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        return x.unflatten(0, (patches.shape[0], n_frames)).mean(1)


ENCODERS: dict[str, type[nn.Module]] = {"divided": DividedEncoder, "joint": JointEncoder, "space": SpaceEncoder}
"""The kinds of attention over space and time by name."""
