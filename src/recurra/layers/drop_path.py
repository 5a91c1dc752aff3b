"""Stochastic depth: leaving out what a layer would add to the residual stream (Huang et al., arXiv 1603.09382)."""

from jaxtyping import Float
from torch import Tensor, nn


class DropPath(nn.Module):
    """Set whole rows to zero with probability p in training, and divide the others by 1 - p, so that the mean stays.

    Args:
        p: probability of dropping a row.

    Raises:
        ValueError: p is not a probability below 1.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"p is {p}; expected a probability from 0 up to, not including, 1")
        self.p = p

    def extra_repr(self) -> str:
        """Show p."""
        return f"p={self.p}"

    def forward(self, x: Float[Tensor, "N *rest"]) -> Float[Tensor, "N *rest"]:
        """Drop rows along dimension 0 in training; in evaluation, or with p = 0, give x itself."""
        if not self.training or self.p == 0.0:
            return x
        kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1.0 - self.p)
        return x * kept.div_(1.0 - self.p)
