"""The ends of a language model with a factor or a bound, as some published models have them."""

from jaxtyping import Float, Int
from torch import Tensor, nn


class ScaledEmbedding(nn.Embedding):
    """An embedding times a constant: Gemma and Griffin multiply theirs, which is the head too, by sqrt(d_model).

    Args:
        n_tokens: rows of the table.
        d_model: its columns.
        scale: what to multiply by.
    """

    def __init__(self, n_tokens: int, d_model: int, scale: float) -> None:
        super().__init__(n_tokens, d_model)
        self.scale = scale

    def forward(self, tokens: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d_model"]:
        """Look tokens up and scale what is found."""
        return super().forward(tokens) * self.scale

    def extra_repr(self) -> str:
        """What print shows."""
        return f"{super().extra_repr()}, scale={self.scale}"


class CappedHead(nn.Module):
    """cap * tanh(W x / cap): logits that stay between -cap and cap (Griffin, arXiv 2402.19427).

    Args:
        linear: the head without its bound.
        cap: the bound, above 0.
    """

    def __init__(self, linear: nn.Linear, cap: float) -> None:
        super().__init__()
        self.linear, self.cap = linear, cap

    def forward(self, hidden: Float[Tensor, "*shape d_model"]) -> Float[Tensor, "*shape classes"]:
        """Compute bounded logits."""
        return self.cap * (self.linear(hidden) / self.cap).tanh()

    @property
    def weight(self) -> Tensor:
        """The matrix, as of a head without a bound."""
        return self.linear.weight

    def extra_repr(self) -> str:
        """What print shows."""
        return f"cap={self.cap}"
