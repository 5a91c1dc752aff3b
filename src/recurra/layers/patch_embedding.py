"""Images as sequences of patches (Dosovitskiy et al. (1), arXiv 2010.11929)."""

from jaxtyping import Float
from torch import Tensor, nn


class PatchEmbedding(nn.Module):
    """Cut images into square patches and project each linearly.

    Args:
        n_channels: channels of the images.
        patch_size: edge of a patch in pixels; it must divide height and width.
        d_model: channels of the output.
    """

    def __init__(self, n_channels: int, patch_size: int, d_model: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(n_channels, d_model, patch_size, stride=patch_size)

    def forward(self, images: Float[Tensor, "N C H W"]) -> Float[Tensor, "N P d_model"]:
        """Embed the patches of each image, line by line from the top left."""
        return self.projection(images).flatten(2).transpose(1, 2)
