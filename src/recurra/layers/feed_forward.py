"""What is done to each step by itself: linear layers, and feed-forward networks by name."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_heads


class LinearWeights(nn.Module):
    """The weights of a linear layer, which their owner reads: calling `nn.Linear` would cost it more, or be wrong.

    What wraps or replaces each `nn.Linear` of a model (peft's adapters, packed weights) leaves these alone. An adapter
    would never be heard.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias)
        self.in_features, self.out_features = in_features, out_features
        self.weight, self.bias = linear.weight, linear.bias


class TiedLinear(LinearWeights):
    """y = W x where W is also the embedding, or that of other layers. A merged adapter on it would change those."""

    def forward(self, x: Float[Tensor, "*shape n_in"]) -> Float[Tensor, "*shape n_out"]:
        """Multiply with the weights."""
        return functional.linear(x, self.weight, self.bias)


class BlockDiagonalLinear(nn.Module):
    """y = x W + b with one square block of W for each head, which has d / n_heads channels.

    The blocks start with the variance of LeCun's initialisation, 1 / inputs; the bias starts from zeros.
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


class FeedForward(nn.Sequential):
    """Linear, GELU, dropout, Linear, on each step separately (GateLoop App. C: "a simple FNN"; GELU is our choice)."""

    def __init__(self, d_model: int, d_hidden: int, dropout: float = 0.0, *, biases: bool = True) -> None:
        super().__init__(
            nn.Linear(d_model, d_hidden, bias=biases),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(d_hidden, d_model, bias=biases),
        )

    @property
    def output_projection(self) -> nn.Module:
        """The layer that writes to the residual stream."""
        return self[-1]

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Apply the network to each step."""
        return super().forward(x)


class _SquaredReLU(nn.Module):
    """max(x, 0)^2 (So et al., arXiv 2109.08668, section 3.1)."""

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Apply the function to every number."""
        return functional.relu(x).square()


class _SquaredReLUFeedForward(FeedForward):
    """The same with a squared ReLU in place of GELU."""

    def __init__(self, d_model: int, d_hidden: int, dropout: float = 0.0, *, biases: bool = True) -> None:
        super().__init__(d_model, d_hidden, dropout, biases=biases)
        self[1] = _SquaredReLU()


class _GatedFeedForward(nn.Module):
    """y = W_down (f(W_gate x) * W_up x), dropout before W_down (Shazeer, arXiv 2002.05202, section 2)."""

    def __init__(
        self,
        activation: Callable[[], nn.Module],
        d_model: int,
        d_hidden: int,
        dropout: float = 0.0,
        *,
        biases: bool = True,
    ) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(d_model, d_hidden, bias=biases) for _ in range(2))
        self.activation = activation()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(d_hidden, d_model, bias=biases)

    @property
    def output_projection(self) -> nn.Module:
        """The layer that writes to the residual stream."""
        return self.down

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Apply the network to each step."""
        y: Tensor = self.down(self.dropout(self.activation(self.gate(x)) * self.up(x)))
        return y


FEED_FORWARDS: dict[str, Callable[..., nn.Module]] = {
    "gelu": FeedForward,
    "relu-squared": _SquaredReLUFeedForward,
    "swiglu": partial(_GatedFeedForward, nn.SiLU),
    "geglu": partial(_GatedFeedForward, nn.GELU),
    "geglu-tanh": partial(_GatedFeedForward, partial(nn.GELU, "tanh")),  # as Gemma has it
}
"""Each is called as `feed_forward(d_model, d_hidden, dropout, biases=...)`."""
