"""Stochastic depth: drop what a layer adds to the residual stream (Huang et al., arXiv 1603.09382)."""

from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require_probability


class DropPath(nn.Module):
    """In training, set each item of dimension 0 to zero with probability p, and divide the others by 1 - p.

    Args:
        p: probability of dropping an item.

    Raises:
        ValueError: `p` is not a probability below 1.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        require_probability(p=p)
        self.p = p

    def extra_repr(self) -> str:
        """Show p."""
        return f"p={self.p}"

    def forward(self, x: Float[Tensor, "N *rest"]) -> Float[Tensor, "N *rest"]:
        """Drop items of dimension 0 in training; in evaluation, or if p = 0, return x itself."""
        if not self.training or self.p == 0.0:
            return x
        kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1.0 - self.p)
        return x * kept.div_(1.0 - self.p)
