"""Dropout for sequences: masks that are locked over time, dropout of whole words, and stochastic depth."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.checks import require_probability

# --- dropout for sequences: masks that are locked over time, and dropout of whole words ---


class LockedDropout(nn.Module):
    """Variational dropout: one mask for all steps of a call (Gal and Ghahramani, arXiv 1512.05287, section 4).

    Args:
        p: probability of dropping a channel of a sequence.

    Raises:
        ValueError: `p` is not a probability below 1.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = _probability(p)

    def extra_repr(self) -> str:
        """Show p."""
        return f"p={self.p}"

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Drop channels in training; in evaluation, or if p = 0, return x itself."""
        if not self.training or self.p == 0.0:
            return x
        return x * _mask((x.shape[0], 1, x.shape[2]), self.p, x)


class WordDropout(nn.Module):
    """Embedding dropout: a word is dropped everywhere in a call (AWD-LSTM, arXiv 1708.02182, section 4.3).

    Args:
        vocab_size: number of words.
        p: probability of dropping a word.

    Raises:
        ValueError: `p` is not a probability below 1.
    """

    def __init__(self, vocab_size: int, p: float) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.p = _probability(p)

    def extra_repr(self) -> str:
        """Show the size and p."""
        return f"vocab_size={self.vocab_size}, p={self.p}"

    def forward(self, x: Float[Tensor, "B L D"], tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        """Drop words from x, the embedding of `tokens`, in training; in evaluation, or if p = 0, return x itself."""
        if not self.training or self.p == 0.0:
            return x
        return x * _mask((self.vocab_size, 1), self.p, x)[tokens]


DROPOUTS: dict[str, Callable[[float], nn.Module]] = {"independent": nn.Dropout, "locked": LockedDropout}
"""Whether the steps of a call have masks of their own or share one."""


def _mask(shape: tuple[int, ...], p: float, like: Tensor) -> Tensor:
    """Draw 0 with probability p and 1 / (1 - p) otherwise, so that the mean is 1."""
    # made of `like`, so that vmap gives each of its inputs a mask of its own
    return like.new_empty(shape).bernoulli_(1.0 - p).div_(1.0 - p)


def _probability(p: float) -> float:
    require_probability(p=p)
    return p


# --- stochastic depth: drop what a layer adds to the residual stream (Huang et al., arXiv 1603.09382) ---


class DropPath(nn.Module):
    """In training, set each item of dimension 0 to zero with probability p, and divide the others by 1 - p.

    Args:
        p: probability of dropping an item.
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
