"""GateLoop's state transition a_n = f(gamma) exp(i g(theta)) (GateLoop (25))."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import choose, kind_of, require, require_number, sentence
from recurra.layers.norms import at_least_float32
from recurra.ops._operator import without_autocast

_Activation = Callable[[Tensor], Tensor]


_LARGEST = 80.0  # beyond it exp(alpha) may be infinite, and its gradient times that of a magnitude of 0 not a number


def stable_exponential(alpha: Tensor) -> Tensor:
    """LRU's magnitude exp(-exp(alpha)), in (0, 1) and biased towards 1 (GateLoop section 2.2 and Figure 4)."""
    return torch.exp(-torch.exp(alpha.clamp(max=_LARGEST)))


_MAGNITUDE_ACTIVATIONS: dict[str, _Activation] = {"sigmoid": torch.sigmoid, "stable_exponential": stable_exponential}
_INVERSES: dict[_Activation, _Activation] = {  # from magnitude back to the pre-activation
    torch.sigmoid: torch.logit,
    stable_exponential: lambda magnitude: torch.log(-torch.log(magnitude)),
}


@dataclass(frozen=True)
class _Ring:
    """The initial transitions of a layer's channels: memories of different lengths at different frequencies."""

    r_min: float = 0.9  # smallest magnitude, above 0
    r_max: float = 0.99  # largest magnitude, below 1; a channel at r remembers about 1 / (1 - r) steps
    max_phase: float = math.pi  # in radians; the phases run from 0 to this angle
    # Largest random shift of a layer's phases, in steps from one phase to the next: 0, or 1 to place the frequencies of
    # several layers between each other's, so that together they resolve longer lists.
    phase_shift: float = 0.0
    input_share: float = 0.1  # initial factor on the weights of the data; with 0 it does not depend on them at first

    def __post_init__(self) -> None:
        require_number(**{f"ring.{field.name}": getattr(self, field.name) for field in fields(self)})
        require(0 < self.r_min < 1, "ring.r_min", self.r_min, "a number above 0 and below 1")
        require(self.r_min <= self.r_max < 1, "ring.r_max", self.r_max, f"at least r_min = {self.r_min} and below 1")
        for name in ("max_phase", "phase_shift", "input_share"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"ring.{name}", value, "a finite number of at least 0")

    def draw(self, n_channels: int) -> tuple[Float[Tensor, " D"], Float[Tensor, " D"]]:
        """Draw magnitudes that are uniform in area, and return them with their phases, shifted if that is asked for."""
        area = torch.rand(n_channels, dtype=torch.float64)
        magnitudes = torch.sqrt(area * (self.r_max**2 - self.r_min**2) + self.r_min**2)
        phases = torch.linspace(0, self.max_phase, n_channels, dtype=torch.float64)
        if self.phase_shift and n_channels > 1:
            phases += torch.rand((), dtype=torch.float64) * self.phase_shift * phases[1]
        return magnitudes, phases


class _Transition(nn.Module, ABC):
    """What all transitions share. The phase is theta itself: it need not be restricted (GateLoop section 4)."""

    def __init__(
        self, d_model: int, n_channels: int, magnitude: _Activation, ring: _Ring | None, phase_scale: float
    ) -> None:
        super().__init__()
        require(0 < phase_scale < math.inf, "phase_scale", phase_scale, "a finite number above 0")
        self.n_channels, self.magnitude, self.ring, self.phase_scale = n_channels, magnitude, ring, phase_scale
        self._make(d_model)
        self.reset_parameters()

    @abstractmethod
    def _make(self, d_model: int) -> None:
        """Make the parameters."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Move the transitions onto the ring, if there is one. Call this again after re-initialising the weights."""
        # Nothing to draw in an outline, where PyTorch would import its compiler for a square root: seconds.
        if self.ring is not None and torch.get_default_device().type != "meta":
            magnitudes, phases = self.ring.draw(self.n_channels)
            self._place(_INVERSES[self.magnitude](magnitudes), phases / self.phase_scale, self.ring.input_share)

    def _polar(self, gamma: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Compute |a_n| and arg(a_n) from their pre-activations, in float32 at least."""
        theta = at_least_float32(theta)
        return self.magnitude(at_least_float32(gamma)), theta if self.phase_scale == 1 else theta * self.phase_scale

    @abstractmethod
    def _place(self, gamma: Tensor, theta: Tensor, input_share: float) -> None:
        """Set gamma and theta of every channel, and scale the weights of the data, if any, by `input_share`."""


class DataTransition(_Transition):
    """The data-controlled transition: gamma and theta are linear projections of x_n (GateLoop (25)).

    Autocast leaves it in float32, the projection included: magnitudes near 1 decide how long a memory lasts, and
    bfloat16 has no number between 0.996 and 1; the error of a phase, 0.008 near pi in bfloat16, adds up over the steps.
    """

    def _make(self, d_model: int) -> None:
        self.projection = nn.Linear(d_model, 2 * self.n_channels)

    def _place(self, gamma: Tensor, theta: Tensor, input_share: float) -> None:
        self.projection.weight.mul_(input_share)
        self.projection.weight[self.n_channels :].div_(self.phase_scale)
        self.projection.bias.copy_(torch.cat([gamma, theta]))

    def forward(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """Compute |a_n| and arg(a_n) in radians."""
        with without_autocast(x):
            bias = self.projection.bias  # a method where torch has quantised the layer; a packed weight has other types
            projected = self.projection(x.to(bias.dtype if isinstance(bias, Tensor) else torch.float32))
        return self._polar(*projected.chunk(2, -1))


class _FixedTransition(_Transition):
    """One learned transition per channel, the same at every step: the paper's comparison in section 5.1."""

    def _make(self, d_model: int) -> None:
        self.gamma = nn.Parameter(torch.randn(self.n_channels))
        self.theta = nn.Parameter(torch.randn(self.n_channels))

    def _place(self, gamma: Tensor, theta: Tensor, input_share: float) -> None:
        self.gamma.copy_(gamma)
        self.theta.copy_(theta)

    def forward(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """Compute |a| and arg(a) in radians, expanded over batch and time."""
        shape = (*x.shape[:2], -1)
        magnitude, phase = self._polar(self.gamma, self.theta)
        return magnitude.expand(shape), phase.expand(shape)


_TRANSITIONS: dict[str, type[DataTransition] | type[_FixedTransition]] = {
    "data": DataTransition,
    "fixed": _FixedTransition,
}


def create_transition(
    d_model: int,
    n_channels: int,
    *,
    transition: str,
    magnitude_activation: str,
    phase_activation: str,
    phase_scale: float,
    ring: Mapping[str, float] | None,
) -> DataTransition | _FixedTransition:
    """Make the transition that a mixer's options of these names describe."""
    choose("phase_activation", {"identity": None}, phase_activation)
    if ring is not None and not isinstance(ring, Mapping):
        raise TypeError(sentence("ring", f"{ring!r}, {kind_of(ring)}", "entries with values, as in {r_min: 0.9}"))
    for name in ring or ():
        choose("an entry of ring", {field.name: field for field in fields(_Ring)}, name)
    return choose("transition", _TRANSITIONS, transition)(
        d_model,
        n_channels,
        choose("magnitude_activation", _MAGNITUDE_ACTIVATIONS, magnitude_activation),
        None if ring is None else _Ring(**ring),
        phase_scale,
    )
