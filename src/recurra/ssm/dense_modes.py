"""The parameters of one diagonal state space model over all channels, as S5 has them (Smith et al. 2023, arXiv
2208.04933)."""

import math

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn

from recurra.checks import choose, require, require_at_least
from recurra.layers.precision import at_least_float32
from recurra.ssm.diagonal import (
    DISCRETISATIONS,
    Discretised,
    decaying_eigenvalues,
    fixed_transition,
    log_spaced_steps,
    run_dense,
)
from recurra.ssm.hippo import hippo_normal_modes

SLOWEST_CLIPPED = 1e-4
"""With `clip_eigs`, real parts are at most minus this, as in S5's published code."""


class DenseModes(nn.Module):
    """A base of mixers that have one set of `d_state` modes over all channels, as parameters of their own.

        h_t = a h_{t-1} + b x_t,  y_t = 2 Re(C h_t) + skip x_t,  a and b by zero-order hold (GateLoop (2)-(5))

    The state matrix starts as HiPPO-N in its eigenbasis V, with V folded in (GateLoop (3a)): V^-1 B and C V for
    real B ~ N(0, 1 / d_model) and C ~ N(0, 1 / d_state) (the published code draws C complex, of twice the variance).
    One mode of each conjugate pair is kept. Real parts are -exp(log_decay), so that no mode can grow (the published
    code leaves them free, or clips them). With J blocks the matrix is block-diagonal, of J equal HiPPO-N. The bilinear
    rule may take the place of zero-order hold.
    """

    def make_modes(
        self,
        d_model: int,
        *,
        d_state: int,
        min_step: float,
        max_step: float,
        blocks: int = 1,
        discretisation: str = "zoh",
        clip_eigs: bool = False,
    ) -> None:
        """Draw the parameters; the options are those of `recurra.mixers.S5`.

        Raises:
            ValueError: an option has a value that does not exist, or a size is out of range.
        """
        require_at_least(1, blocks=blocks)
        fits = d_state % (2 * blocks) == 0
        require(fits, "blocks", blocks, f"a divisor of d_state / 2 = {d_state // 2}", "modes come in conjugate pairs")
        self.discretise = choose("discretisation", DISCRETISATIONS, discretisation)
        self.slowest = SLOWEST_CLIPPED if clip_eigs else 0.0
        modes, n_kept = hippo_normal_modes(d_state // blocks), d_state // 2
        vectors = torch.block_diag(*[modes.vectors] * blocks)
        b = vectors.mH @ (torch.randn(d_state, d_model) * d_model**-0.5).to(vectors.dtype)
        c = (torch.randn(d_model, d_state) * d_state**-0.5).to(vectors.dtype) @ vectors
        self.log_step = nn.Parameter(log_spaced_steps(n_kept, min_step, max_step))
        self.log_decay = nn.Parameter(torch.full((n_kept,), math.log(0.5)))
        self.frequency = nn.Parameter(modes.frequency.repeat(blocks).to(torch.get_default_dtype()))
        self.input_weights = nn.Parameter(_as_real(b))  # B: real, imaginary
        self.output_weights = nn.Parameter(_as_real(c))  # C: real, imaginary
        self.skip = nn.Parameter(torch.randn(d_model))

    def transition_parameters(self) -> set[nn.Parameter]:
        """Step sizes and eigenvalues, which make a: they may want their own learning rate and no weight decay."""
        return {self.log_step, self.log_decay, self.frequency}

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L n"], Float[Tensor, "B L n"]]:
        """Return |a| and its phase in radians for every kept mode, the same at every step."""
        return fixed_transition(self.discretised().a, x)

    def discretised(self) -> Discretised:
        """Return a and the factor of B."""
        step = torch.exp(at_least_float32(self.log_step))
        eigenvalues = decaying_eigenvalues(self.log_decay, self.frequency)
        if self.slowest:
            eigenvalues = torch.complex(eigenvalues.real.clamp(max=-self.slowest), eigenvalues.imag)
        return self.discretise(eigenvalues, step)

    def run_modes(
        self, x: Float[Tensor, "B L d_model"], h: Complex[Tensor, "B n"], mask: Bool[Tensor, "B L"] | None
    ) -> tuple[Float[Tensor, "B L d_model"], Complex[Tensor, "B n"]]:
        """Return y and the modes after the last step; where `mask` is False they pass through."""
        a, factor = self.discretised()
        b = factor[:, None] * torch.view_as_complex(at_least_float32(self.input_weights))
        c = 2 * torch.view_as_complex(at_least_float32(self.output_weights))
        y, h = run_dense(x, a, b, c, h, mask)
        return y + self.skip * x, h


def _as_real(z: Complex[Tensor, "rows columns"]) -> Float[Tensor, "rows columns 2"]:
    return torch.view_as_real(z.resolve_conj()).to(torch.get_default_dtype())
