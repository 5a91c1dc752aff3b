"""S5: one state space model over all channels (Smith et al. 2023, "Simplified State Space Layers for Sequence
Modeling", arXiv 2208.04933; GateLoop section 2.2)."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.layers.precision import at_least_float32
from recurra.mixers.base import Carried, Mixer
from recurra.mixers.registry import register_mixer
from recurra.ssm.diagonal import (
    Discretised,
    decaying_eigenvalues,
    fixed_transition,
    log_spaced_steps,
    run_dense,
    zero_order_hold,
)
from recurra.ssm.hippo import hippo_normal_modes


class S5State(NamedTuple):
    """The kept modes, complex64 whatever the precision of the input (complex128 in a float64 layer)."""

    h: Complex[Tensor, "B n"]


@register_mixer("s5")
class S5(Mixer):
    """y = u * sigmoid(W u), u = GELU(SSM(x) + skip x), with one SSM that reads and writes all channels.

        h_t = a h_{t-1} + b x_t,  SSM(x)_t = 2 Re(C h_t),  a and b by zero-order hold (GateLoop (2)-(5))

    The state matrix starts as HiPPO-N in its eigenbasis V, with V folded in (GateLoop (3a)): V^-1 B and C V for
    real B ~ N(0, 1 / d_model) and C ~ N(0, 1 / d_state) (the published code draws C complex, of twice the variance).
    One mode of each conjugate pair is kept. Real parts are -exp(log_decay), so that no mode can grow (the published
    code leaves them free, or clips them). The gate is the weighted sigmoid gate unit of the published layer; its
    dropout and normalisation belong to `recurra.models.Block`.

    Args:
        d_model: channels of x and y.
        d_state: modes, an even number (the paper's P).
        min_step, max_step: the step sizes at the start are spaced logarithmically between these, one per kept mode.

    Raises:
        ValueError: a size is out of range.
    """

    skips_padding = True

    def __init__(self, d_model: int, *, d_state: int = 64, min_step: float = 0.001, max_step: float = 0.1) -> None:
        modes = hippo_normal_modes(d_state)
        n_kept = d_state // 2
        super().__init__(d_model, S5State, h=Carried((n_kept,), is_complex=True))
        b = modes.vectors.mH @ (torch.randn(d_state, d_model) * d_model**-0.5).to(modes.vectors.dtype)
        c = (torch.randn(d_model, d_state) * d_state**-0.5).to(modes.vectors.dtype) @ modes.vectors
        self.log_step = nn.Parameter(log_spaced_steps(n_kept, min_step, max_step))
        self.log_decay = nn.Parameter(torch.full((n_kept,), math.log(0.5)))
        self.frequency = nn.Parameter(modes.frequency.to(torch.get_default_dtype()))
        self.input_weights = nn.Parameter(_as_real(b))  # B: real, imaginary
        self.output_weights = nn.Parameter(_as_real(c))  # C: real, imaginary
        self.skip = nn.Parameter(torch.randn(d_model))
        self.gate = nn.Linear(d_model, d_model)

    def transition_parameters(self) -> set[nn.Parameter]:
        """Step sizes and eigenvalues, which make a: they may want their own learning rate and no weight decay."""
        return {self.log_step, self.log_decay, self.frequency}

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L n"], Float[Tensor, "B L n"]]:
        """Return |a| and its phase in radians for every kept mode, the same at every step."""
        return fixed_transition(self.discretised().a, x)

    def discretised(self) -> Discretised:
        """Return a and the factor of B."""
        step = torch.exp(at_least_float32(self.log_step))
        return zero_order_hold(decaying_eigenvalues(self.log_decay, self.frequency), step)

    def mix(
        self, x: Float[Tensor, "B L d_model"], state: S5State, mask: Bool[Tensor, "B L"] | None
    ) -> tuple[Float[Tensor, "B L d_model"], S5State]:
        """Run one set of modes over all channels, then the gate."""
        a, factor = self.discretised()
        b = factor[:, None] * torch.view_as_complex(at_least_float32(self.input_weights))
        c = 2 * torch.view_as_complex(at_least_float32(self.output_weights))
        y, h = run_dense(x, a, b, c, state.h, mask)
        u = functional.gelu(y + self.skip * x)
        return u * torch.sigmoid(self.gate(u)), S5State(h)


def _as_real(z: Complex[Tensor, "rows columns"]) -> Float[Tensor, "rows columns 2"]:
    return torch.view_as_real(z.resolve_conj()).to(torch.get_default_dtype())
