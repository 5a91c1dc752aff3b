"""Norms, by name, and the precision in which recurrences run."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn


def at_least_float32(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32, in which recurrences run and states are kept; keep other dtypes."""
    return x if x.dtype is torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))


_EPSILON = 1e-6  # as in the published code; a vector of zeros stays zeros, with a finite gradient


def unit_length(x: Float[Tensor, "*shape channels"]) -> Float[Tensor, "*shape channels"]:
    """Divide by the Euclidean length over the last dimension, in float32 or better."""
    x = at_least_float32(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, in float32 or better (arXiv 1910.07467).

    Unlike torch.nn.RMSNorm it takes float32 inputs in a bfloat16 layer, as recurrences return them, and keeps them.
    Each of `n_groups` equal groups of channels has a mean of its own; the weights are not shared between them.
    """

    def __init__(self, n_channels: int, epsilon: float = 1e-5, n_groups: int = 1) -> None:
        super().__init__()
        self.epsilon, self.n_groups = epsilon, n_groups
        self.weight = nn.Parameter(torch.ones(n_channels))

    def forward(self, x: Float[Tensor, "*shape channels"]) -> Float[Tensor, "*shape channels"]:
        """Normalise x; float16 and bfloat16 become float32."""
        x = at_least_float32(x).unflatten(-1, (self.n_groups, -1))
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)).flatten(-2) * self.weight


NORMS: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
"""LayerNorm (Ba et al., arXiv 1607.06450), and RMSNorm, without mean and shift (Zhang and Sennrich, arXiv 1910.07467);
both are called as `norm(n_channels, eps=...)`."""
