"""Dropout for sequences: masks that are locked over time, dropout of whole words, and stochastic depth."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.checks import require_probability


class _Dropout(nn.Module):
    """What returns its input itself in evaluation, or if p = 0."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        require_probability(p=p)
        self.p = p

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def _masked(self, x: Tensor, shape: tuple[int, ...], places: Tensor | None = None) -> Tensor:
        """Multiply by 0 with probability p and by 1 / (1 - p) otherwise, so that the mean stays."""
        if not self.training or self.p == 0.0:
            return x
        # made of x, so that vmap gives each of its inputs a mask of its own
        mask = x.new_empty(shape).bernoulli_(1.0 - self.p).div_(1.0 - self.p)
        return x * (mask if places is None else mask[places])


class ScaledDropout(nn.Dropout):
    """Dropout, and then a factor, in evaluation too: what a block adds to its residual stream, as Granite scales it."""

    def __init__(self, p: float, scale: float) -> None:
        super().__init__(p)
        self.scale = scale

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Drop channels in training, and scale."""
        return super().forward(x) * self.scale


class LockedDropout(_Dropout):
    """Variational dropout: one mask for all steps of a call (Gal and Ghahramani, arXiv 1512.05287, section 4).

    Args:
        p: probability of dropping a channel of a sequence.

    Raises:
        ValueError: `p` is not a probability below 1.
    """

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Drop channels in training; in evaluation, or if p = 0, return x itself."""
        return self._masked(x, (x.shape[0], 1, x.shape[2]))


class WordDropout(_Dropout):
    """Embedding dropout: a word is dropped everywhere in a call (AWD-LSTM, arXiv 1708.02182, section 4.3).

    Args:
        vocab_size: number of words.
        p: probability of dropping a word.

    Raises:
        ValueError: `p` is not a probability below 1.
    """

    def __init__(self, vocab_size: int, p: float) -> None:
        super().__init__(p)
        self.vocab_size = vocab_size

    def forward(self, x: Float[Tensor, "B L D"], tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        """Drop words from x, the embedding of `tokens`, in training; in evaluation, or if p = 0, return x itself."""
        return self._masked(x, (self.vocab_size, 1), tokens)


class DropPath(_Dropout):
    """Stochastic depth (Huang et al., arXiv 1603.09382): drop items of what a layer adds to its input."""

    def forward(self, x: Float[Tensor, "N *rest"]) -> Float[Tensor, "N *rest"]:
        """Drop items of dimension 0 in training; in evaluation, or if p = 0, return x itself."""
        return self._masked(x, (x.shape[0],) + (1,) * (x.dim() - 1))


DROPOUTS: dict[str, Callable[[float], nn.Module]] = {"independent": nn.Dropout, "locked": LockedDropout}
"""Whether the steps of a call have masks of their own or share one."""
