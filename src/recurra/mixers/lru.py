"""The linear recurrent unit (Orvieto et al. 2023, "Resurrecting Recurrent Neural Networks for Long Sequences",
arXiv 2303.06349; GateLoop sections 1 and 4).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from recurra.checks import require_at_least, require_positive
from recurra.layers.norms import at_least_float32
from recurra.layers.state_space import fixed_transition, run_dense
from recurra.mixers.base import Mixer, StateSpec, register_mixer


class LRUState(NamedTuple):
    """The modes."""

    h: Complex[Tensor, "B N"]


@register_mixer("lru")
class LRU(Mixer):
    """y_t = Re(C h_t) + skip x_t,  h_t = a h_{t-1} + gamma B x_t,  a = exp(-exp(nu) + i exp(theta)).

    Initially, a is uniform on the ring between the radii `r_min` and `r_max`, up to the phase `max_phase`, and
    gamma = sqrt(1 - |a|^2), learned as its logarithm. B and C are dense and complex: real and imaginary parts are drawn
    from N(0, 1 / (2 d_model)) and N(0, 1 / d_state), the skip from N(0, 1). Modes do not come in pairs. The layer is
    the recurrence alone; the published block's network on top is that of `recurra.models.language_model.Block`.

    Args:
        d_state: modes; `d_model` if None.
        r_min, r_max: range of the initial |a|, 0 <= r_min < r_max <= 1.
        max_phase: largest initial phase, in radians.
    """

    skips_padding = True

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int | None = None,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 2 * math.pi,
    ) -> None:
        d_state = d_model if d_state is None else d_state
        require_at_least(1, d_model=d_model, d_state=d_state)
        super().__init__(d_model, LRUState, h=StateSpec((d_state,), is_complex=True))
        if not 0 <= r_min < r_max <= 1:
            raise ValueError(f"r_min is {r_min} and r_max {r_max}; expected 0 <= r_min < r_max <= 1")
        require_positive(max_phase=max_phase)
        # in float64: float32 draws an exact 0 now and then, whose logarithm training never leaves
        area, angle = torch.rand(2, d_state, dtype=torch.float64)
        decay = -0.5 * torch.log(area * (r_max**2 - r_min**2) + r_min**2)  # -log |a|
        dtype = torch.get_default_dtype()
        self.nu = nn.Parameter(torch.log(decay).to(dtype))
        self.theta = nn.Parameter(torch.log(max_phase * angle).to(dtype))
        self.log_gamma = nn.Parameter((0.5 * torch.log(-torch.expm1(-2 * decay))).to(dtype))
        self.input_weights = nn.Parameter(torch.randn(d_state, d_model, 2) * (2 * d_model) ** -0.5)  # B
        self.output_weights = nn.Parameter(torch.randn(d_model, d_state, 2) * d_state**-0.5)  # C
        self.skip = nn.Parameter(torch.randn(d_model))

    def transition_parameters(self) -> set[nn.Parameter]:
        return {self.nu, self.theta}

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L N"], Float[Tensor, "B L N"]]:
        """Return |a| and its phase in radians for every mode, the same at every step."""
        return fixed_transition(self.eigenvalues(), x)

    def eigenvalues(self) -> Complex[Tensor, " N"]:
        """a = exp(-exp(nu) + i exp(theta)) (GateLoop section 2.2): |a| < 1, whatever training does to nu."""
        nu, theta = at_least_float32(self.nu), at_least_float32(self.theta)
        return torch.exp(torch.complex(-torch.exp(nu.clamp(max=80.0)), torch.exp(theta)))  # beyond: infinity times 0

    def mix(self, x: Tensor, state: LRUState, mask: Tensor | None) -> tuple[Tensor, LRUState]:
        a = self.eigenvalues()
        gamma = torch.exp(at_least_float32(self.log_gamma))[:, None]
        b = gamma * torch.view_as_complex(at_least_float32(self.input_weights))
        c = torch.view_as_complex(at_least_float32(self.output_weights))
        y, h = run_dense(x, a, b, c, state.h, mask)
        return y + self.skip * x, LRUState(h)
