"""Channel mixing: the position-wise feed-forward network."""

from jaxtyping import Float
from torch import Tensor, nn


class FeedForward(nn.Sequential):
    """Linear, GELU, dropout, Linear, on each step by itself (GateLoop App. C: "a simple FNN"; GELU is our choice)."""

    def __init__(self, d_model: int, d_hidden: int, dropout: float = 0.0) -> None:
        super().__init__(nn.Linear(d_model, d_hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(d_hidden, d_model))

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Apply the network to each step."""
        return super().forward(x)
