"""Where GateLoop's state transition a_n = f(gamma) exp(i g(theta)) comes from (GateLoop eq. (25))."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

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
INVERSES: dict[Activation, Activation] = {
    torch.sigmoid: torch.logit,
    stable_exponential: lambda magnitude: torch.log(-torch.log(magnitude)),
    identity: identity,
}
"""What gives an activation's result, from that result."""


@dataclass(frozen=True)
class Ring:
    """Where the transitions of a layer's channels start: memories of different lengths at different frequencies.

    The magnitude is uniform on the ring between two radii, as the LRU's is (Orvieto et al. 2023, arXiv 2303.06349),
    the phase goes up in even steps: of a head of size 1, outputs are real, and a phase and its opposite are the same.
    The GateLoop paper does not say how its transitions start.

    Raises:
        TypeError, ValueError: an entry is no number, or out of range.
    """

    r_min: float = 0.9
    """Smallest magnitude, above 0."""
    r_max: float = 0.99
    """Largest magnitude, below 1; not below `r_min`. A channel at r remembers some 1 / (1 - r) steps."""
    max_phase: float = math.pi
    """The phases go from 0 to this angle, in radians."""
    input_share: float = 0.1
    """Of the data-controlled transition: what its weights are multiplied by at the start, 0 for a transition that
    depends on no data yet."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)):
                raise TypeError(f"ring has {field.name} {value!r}; expected a number")
        if not 0 < self.r_min <= self.r_max < 1:
            raise ValueError(f"ring has r_min {self.r_min} and r_max {self.r_max}; expected 0 < r_min <= r_max < 1")
        for name in ("max_phase", "input_share"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"ring has {name} {getattr(self, name)}; expected 0 or more")

    def draw(self, n_channels: int) -> tuple[Float[Tensor, " D"], Float[Tensor, " D"]]:
        """Draw magnitudes, uniform in area, and give them with their phases."""
        area = torch.rand(n_channels, dtype=torch.float64)
        magnitudes = torch.sqrt(area * (self.r_max**2 - self.r_min**2) + self.r_min**2)
        return magnitudes, torch.linspace(0, self.max_phase, n_channels, dtype=torch.float64)


def ring_of(options: Mapping[str, float] | None) -> Ring | None:
    """Make a Ring of an option's mapping; nothing of None.

    Raises:
        TypeError, ValueError: an entry is unknown, no number, or out of range.
    """
    if options is None:
        return None
    known = [field.name for field in fields(Ring)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"ring has no {', '.join(map(repr, unknown))}; it may have {', '.join(known)}")
    return Ring(**options)


class Transition(nn.Module, ABC):
    """What both kinds share: the number of channels, activations, and a ring to start on, if any."""

    def __init__(self, n_channels: int, magnitude: Activation, phase: Activation, ring: Ring | None) -> None:
        super().__init__()
        self.n_channels, self.magnitude, self.phase, self.ring = n_channels, magnitude, phase, ring

    @torch.no_grad()
    def place_on_ring(self) -> None:
        """Start on the ring, where there is one. Whoever draws a model's weights anew has to ask for it again."""
        if self.ring is not None:
            magnitudes, phases = self.ring.draw(self.n_channels)
            self._place(INVERSES[self.magnitude](magnitudes), INVERSES[self.phase](phases), self.ring.input_share)

    @abstractmethod
    def _place(self, gamma: Tensor, theta: Tensor, input_share: float) -> None:
        """Set gamma and theta of every channel, and multiply the weights of the data, if there are any."""


class DataTransition(Transition):
    """The data-controlled transition: gamma and theta are linear projections of x_n.

    They are activated in float32 also under autocast: a magnitude near 1 decides how long a memory lasts, and bfloat16
    has no number between 0.996 and 1.
    """

    def __init__(
        self, d_model: int, n_channels: int, magnitude: Activation, phase: Activation, ring: Ring | None = None
    ) -> None:
        super().__init__(n_channels, magnitude, phase, ring)
        self.projection = nn.Linear(d_model, 2 * n_channels)
        self.place_on_ring()

    def _place(self, gamma: Tensor, theta: Tensor, input_share: float) -> None:
        self.projection.weight.mul_(input_share)
        self.projection.bias.copy_(torch.cat([gamma, theta]))

    def forward(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """Give |a_n| and arg(a_n) in radians."""
        gamma, theta = _at_least_float32(self.projection(x)).chunk(2, -1)
        return self.magnitude(gamma), self.phase(theta)


class FixedTransition(Transition):
    """One learned transition per channel, the same at every step: the paper's comparison in section 5.1."""

    def __init__(
        self, d_model: int, n_channels: int, magnitude: Activation, phase: Activation, ring: Ring | None = None
    ) -> None:
        super().__init__(n_channels, magnitude, phase, ring)
        self.gamma = nn.Parameter(torch.randn(n_channels))
        self.theta = nn.Parameter(torch.randn(n_channels))
        self.place_on_ring()

    def _place(self, gamma: Tensor, theta: Tensor, input_share: float) -> None:
        self.gamma.copy_(gamma)
        self.theta.copy_(theta)

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
