"""Channel mixing: feed-forward networks by name, block-diagonal maps, output gates, and RWKV's token shift."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_heads
from recurra.layers.norms import at_least_float32


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
    "swiglu": partial(_GatedFeedForward, nn.SiLU),
    "geglu": partial(_GatedFeedForward, nn.GELU),
    "geglu-tanh": partial(_GatedFeedForward, partial(nn.GELU, "tanh")),  # as Gemma has it
}
"""Each is called as `feed_forward(d_model, d_hidden, dropout, biases=...)`."""


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
    """y = W x where W is the embedding too. An adapter on it would change the embedding when it is merged."""

    def forward(self, x: Float[Tensor, "*shape n_in"]) -> Float[Tensor, "*shape n_out"]:
        """Multiply with the weights."""
        return functional.linear(x, self.weight, self.bias)


class SiLUOutputGate(nn.Module):
    """y * SiLU(W_g x): the input decides what leaves a recurrence for its output projection."""

    def __init__(self, d_model: int, d_v: int) -> None:
        super().__init__()
        self.projection = nn.Linear(d_model, d_v)

    def forward(self, x: Float[Tensor, "B L d_model"], y: Float[Tensor, "B L d_v"]) -> Float[Tensor, "B L d_v"]:
        """Gate y, the recurrence's output, by x, its input."""
        return y * functional.silu(self.projection(x))


def mixed(
    now: Float[Tensor, "B L D"], previous: Float[Tensor, "B L D"], share: Float[Tensor, " D"]
) -> Float[Tensor, "B L D"]:
    """share * now + (1 - share) * previous."""
    share = at_least_float32(share)
    return share * now + (1 - share) * previous


def with_previous(
    x: Float[Tensor, "B L D"], before: Float[Tensor, "B D"], mask: Bool[Tensor, "B L"] | None
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"], Float[Tensor, "B D"]]:
    """Return x, the counted step before each, and the last counted step: what `before` is in the next call.

    This is RWKV's token shift (Peng et al. 2023, arXiv 2305.13048, section 3.1). x has at least one step; padding may
    stand anywhere and is not read. All three are float32 or better, the last one in memory of its own.
    """
    x = at_least_float32(x)
    known = torch.cat([before[:, None], x], 1)
    if mask is None:
        return x, known[:, :-1], known[:, -1].clone()
    steps = torch.arange(1, known.shape[1], device=x.device) * mask
    places = torch.cat([torch.zeros_like(steps[:, :1]), steps], 1).cummax(1).values
    rows = torch.take_along_dim(known, places[..., None], 1)
    return x, rows[:, :-1], rows[:, -1].clone()
