"""Where GateLoop's state transition a_n = f(gamma) exp(i g(theta)) comes from (GateLoop eq. (25))."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


def stable_exponential(alpha: Tensor) -> Tensor:
    """LRU's magnitude exp(-exp(alpha)), in (0, 1) and biased towards 1 (GateLoop section 2.2 and Figure 4)."""
    return torch.exp(-torch.exp(alpha))


def identity(theta: Tensor) -> Tensor:
    """The phase as it comes: it need not be restricted to an interval (GateLoop section 4)."""
    return theta


MAGNITUDE_ACTIVATIONS: dict[str, Activation] = {"sigmoid": torch.sigmoid, "stable_exponential": stable_exponential}
PHASE_ACTIVATIONS: dict[str, Activation] = {"identity": identity}


class DataTransition(nn.Module):
    """The data-controlled transition: gamma and theta are linear projections of x_n.

    They are activated in float32 also under autocast: a magnitude near 1 decides how long a memory lasts, and bfloat16
    has no number between 0.996 and 1.
    """

    def __init__(self, d_model: int, n_channels: int, magnitude: Activation, phase: Activation) -> None:
        super().__init__()
        self.projection = nn.Linear(d_model, 2 * n_channels)
        self.magnitude, self.phase = magnitude, phase

    def forward(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """Give |a_n| and arg(a_n) in radians."""
        gamma, theta = _at_least_float32(self.projection(x)).chunk(2, -1)
        return self.magnitude(gamma), self.phase(theta)


class FixedTransition(nn.Module):
    """One learned transition per channel, the same at every step: the paper's comparison in section 5.1."""

    def __init__(self, d_model: int, n_channels: int, magnitude: Activation, phase: Activation) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(n_channels))
        self.theta = nn.Parameter(torch.randn(n_channels))
        self.magnitude, self.phase = magnitude, phase

    def forward(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """Give |a| and arg(a) in radians, expanded over batch and time."""
        shape = (*x.shape[:2], -1)
        gamma, theta = _at_least_float32(self.gamma), _at_least_float32(self.theta)
        return self.magnitude(gamma).expand(shape), self.phase(theta).expand(shape)


TRANSITIONS: dict[str, type[DataTransition] | type[FixedTransition]] = {
    "data": DataTransition,
    "fixed": FixedTransition,
}


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
