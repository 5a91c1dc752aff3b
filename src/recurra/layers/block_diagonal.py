"""A linear layer with a block-diagonal matrix: channels meet within their head alone."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require_heads


class BlockDiagonalLinear(nn.Module):
    """y = x W + b with one square block of W for each head, which has d / n_heads channels.

    The blocks start with the variance of LeCun's initialisation, 1 / inputs; the bias starts from zeros.

    Args:
        channels: d, of x and y.
        n_heads: blocks; they divide the channels.

    Raises:
        ValueError: the heads do not divide the channels.
    """

    def __init__(self, channels: int, n_heads: int) -> None:
        super().__init__()
        require_heads(n_heads, channels=channels)
        d_head = channels // n_heads
        self.n_heads = n_heads
        self.weight = nn.Parameter(torch.randn(n_heads, d_head, d_head) * d_head**-0.5)  # head, input, output
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Float[Tensor, "B L d"]) -> Float[Tensor, "B L d"]:
        """Multiply the channels of every head with its block."""
        heads = x.unflatten(-1, (self.n_heads, -1))
        return torch.einsum("blhi,hij->blhj", heads, self.weight).flatten(-2) + self.bias
