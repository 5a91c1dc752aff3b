"""Gates between a mixer's recurrence and its output projection."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional


class NoOutputGate(nn.Module):
    """No gate: y as it is."""

    def __init__(self, d_model: int, d_v: int) -> None:
        super().__init__()

    def forward(self, x: Float[Tensor, "B L d_model"], y: Float[Tensor, "B L d_v"]) -> Float[Tensor, "B L d_v"]:
        """Return y."""
        return y


class SiLUOutputGate(nn.Module):
    """y * SiLU(W_g x): the input decides what leaves the layer."""

    def __init__(self, d_model: int, d_v: int) -> None:
        super().__init__()
        self.projection = nn.Linear(d_model, d_v)

    def forward(self, x: Float[Tensor, "B L d_model"], y: Float[Tensor, "B L d_v"]) -> Float[Tensor, "B L d_v"]:
        """Gate y, the recurrence's output, by x, its input."""
        return y * functional.silu(self.projection(x))
