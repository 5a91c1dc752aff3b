"""The norms of residual blocks, by name."""

from collections.abc import Callable

from torch import nn

NORMS: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
"""LayerNorm (Ba et al., arXiv 1607.06450), and RMSNorm, without mean and shift (Zhang and Sennrich, arXiv 1910.07467);
both are called as `norm(n_channels, eps=...)`."""
