"""Channel mixing: the position-wise feed-forward networks, by name."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn


class FeedForward(nn.Sequential):
    """Linear, GELU, dropout, Linear, on each step by itself (GateLoop App. C: "a simple FNN"; GELU is our choice)."""

    def __init__(self, d_model: int, d_hidden: int, dropout: float = 0.0, *, biases: bool = True) -> None:
        super().__init__(
            nn.Linear(d_model, d_hidden, bias=biases),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(d_hidden, d_model, bias=biases),
        )

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Apply the network to each step."""
        return super().forward(x)


class GatedFeedForward(nn.Module):
    """y = W_down (f(W_gate x) * W_up x), dropout before W_down (Shazeer, arXiv 2002.05202, section 2).

    Args:
        activation: f; SiLU for SwiGLU, GELU for GEGLU.
        d_model: channels of x and y.
        d_hidden: hidden channels, of both the gate and what it multiplies.
        dropout: probability of dropping a hidden channel.
        biases: whether the three projections have biases.
    """

    def __init__(
        self, activation: nn.Module, d_model: int, d_hidden: int, dropout: float = 0.0, *, biases: bool = True
    ) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(d_model, d_hidden, bias=biases) for _ in range(2))
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(d_hidden, d_model, bias=biases)

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Apply the network to each step."""
        y: Tensor = self.down(self.dropout(self.activation(self.gate(x)) * self.up(x)))
        return y


def swiglu(d_model: int, d_hidden: int, dropout: float = 0.0, *, biases: bool = True) -> GatedFeedForward:
    """Make a feed-forward network with a SiLU gate."""
    return GatedFeedForward(nn.SiLU(), d_model, d_hidden, dropout, biases=biases)


def geglu(d_model: int, d_hidden: int, dropout: float = 0.0, *, biases: bool = True) -> GatedFeedForward:
    """Make a feed-forward network with a GELU gate."""
    return GatedFeedForward(nn.GELU(), d_model, d_hidden, dropout, biases=biases)


def geglu_tanh(d_model: int, d_hidden: int, dropout: float = 0.0, *, biases: bool = True) -> GatedFeedForward:
    """Make a feed-forward network with a GELU gate in its approximation by tanh, as Gemma has."""
    return GatedFeedForward(nn.GELU("tanh"), d_model, d_hidden, dropout, biases=biases)


FEED_FORWARDS: dict[str, Callable[..., nn.Module]] = {
    "gelu": FeedForward,
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu-tanh": geglu_tanh,
}
"""Each is called as `feed_forward(d_model, d_hidden, dropout, biases=...)`."""
