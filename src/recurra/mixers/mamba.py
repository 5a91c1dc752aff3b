"""Mamba: a selective state space model (Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State
Spaces", arXiv 2312.00752, Algorithm 2 and section 3.4).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require, require_at_least, require_positive
from recurra.layers.convolution import ShortConvolution
from recurra.layers.norms import RMSNorm, at_least_float32, gated
from recurra.layers.state_space import inverse_softplus_of_steps
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops.selective_scan.operator import selective_scan


class MambaState(NamedTuple):
    """The modes of every channel and the last inputs of the convolution, the oldest first."""

    h: Float[Tensor, "B d_state d_inner"]
    inputs: Float[Tensor, "B K_1 d_inner"]


@register_mixer("mamba")
class Mamba(Mixer):
    """y = W_o ((SSM(u) + skip u) * SiLU(z)) with u = SiLU(convolution(W_x x)) and z = W_z x.

        h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t u_t,  SSM(u)_t = C_t h_t

    Every channel of u has `d_state` modes, with A = -exp(log_decay). B_t and C_t are projections of u_t that all
    channels share, and Delta_t = softplus(W_2 W_1 u_t + step_bias) is a step size per channel, through a bottleneck of
    `dt_rank` (Algorithm 2). A is discretised by zero-order hold and B by Euler's rule, as in the published code.

    Initialisation is as published: A = -1, -2, ..., -N in every channel (S4D-Real), skip = 1, step sizes at u = 0
    log-uniform from min_step to max_step, and W_2 uniform within dt_rank^-1/2.

    Our choices: the bias of Delta is added in float32, because bfloat16 would round small step sizes by up to 2 %.
    Padding has a step size of 0, which is a transition of 1.

    Args:
        d_state: modes per channel (the paper's N).
        d_conv: steps that the convolution sees, the step itself included.
        expand: channels of u are `expand * d_model`.
        dt_rank: the bottleneck before the step sizes; d_model / 16, rounded up, if None.
        selection_norm: epsilon of a root mean square norm of W_1 u_t, B_t and C_t each, as in Falcon Mamba (arXiv
            2410.05355); none, as in the paper, if None.
        selection_scales: whether these norms have learned scales, as in Jamba (arXiv 2403.19887, section 6.4).
        min_step, max_step: range of the initial step sizes.
    """

    skips_padding = True
    transition_looks_back = True  # the step size comes from the convolved input

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        selection_norm: float | None = None,
        selection_scales: bool = False,
        min_step: float = 0.001,
        max_step: float = 0.1,
    ) -> None:
        rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        require_at_least(1, d_model=d_model, d_state=d_state, expand=expand, dt_rank=rank)
        require_at_least(2, d_conv=d_conv)
        d_inner = expand * d_model
        specs = {"h": StateSpec((d_state, d_inner)), "inputs": StateSpec((d_conv - 1, d_inner))}
        super().__init__(d_model, MambaState, **specs)
        self.d_state, self.dt_rank = d_state, rank
        self.input_projection = nn.Linear(d_model, 2 * d_inner, bias=False)  # W_x and W_z
        self.convolution = ShortConvolution(d_inner, d_conv)
        self.selection = nn.Linear(d_inner, rank + 2 * d_state, bias=False)  # W_1, and those of B and C
        self.step_norm, self.b_norm, self.c_norm = (
            _norm_of_selection(size, selection_norm, selection_scales) for size in (rank, d_state, d_state)
        )
        self.step_projection = nn.Linear(rank, d_inner, bias=False)  # W_2
        self.step_bias = nn.Parameter(inverse_softplus_of_steps(d_inner, min_step, max_step))
        self.log_decay = nn.Parameter(torch.log(torch.arange(1.0, d_state + 1)).repeat(d_inner, 1))
        self.skip = nn.Parameter(torch.ones(d_inner))
        self.output_projection = nn.Linear(d_inner, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W_2 as published. Call this again after re-initialising the weights."""
        bound = self.dt_rank**-0.5
        nn.init.uniform_(self.step_projection.weight, -bound, bound)

    def transition_parameters(self) -> set[nn.Parameter]:
        return {self.log_decay, self.step_bias}

    def transition(
        self, x: Float[Tensor, "B L d_model"], state: MambaState | None = None
    ) -> tuple[Float[Tensor, "B L _"], Float[Tensor, "B L _"]]:
        """Return exp(Delta_t A) of every channel and mode, and phases of 0, after `state`; None starts a stream."""
        inputs = None if state is None else state.inputs
        projected = self.input_projection(x).chunk(2, -1)[0]
        u, _ = self._convolved(projected, inputs, None)
        step, _, _ = self._selected(u.to(projected.dtype))
        magnitude = torch.exp(step[..., None] * self._eigenvalues()).flatten(2)
        return magnitude, torch.zeros_like(magnitude)

    def mix(self, x: Tensor, state: MambaState, mask: Tensor | None) -> tuple[Tensor, MambaState]:
        u, z = self.input_projection(x).chunk(2, -1)
        u, inputs = self._convolved(u, state.inputs, mask)
        step, b, c = self._selected(u.to(z.dtype))
        y, h = selective_scan(u, mask_fill(step, mask, 0), self._eigenvalues(), b, c, state.h)
        y = gated(y, z, skip=(u, at_least_float32(self.skip)))
        return self.output_projection(y), MambaState(h, inputs)

    def _convolved(self, x: Tensor, inputs: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """u, in float32 or better, and the convolution's next state."""
        convolved: tuple[Tensor, Tensor] = self.convolution(x, inputs, mask, silu=True)
        return convolved

    def _selected(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Delta (B, L, d_inner), B and C (B, L, d_state) of every step."""
        narrow, b, c = self.selection(u).split([self.dt_rank, self.d_state, self.d_state], -1)
        wide = self.step_projection(self.step_norm(narrow).to(narrow.dtype))
        step = at_least_float32(wide) + at_least_float32(self.step_bias)
        return functional.softplus(step), at_least_float32(self.b_norm(b)), at_least_float32(self.c_norm(c))

    def _eigenvalues(self) -> Float[Tensor, "d_inner d_state"]:
        return -torch.exp(at_least_float32(self.log_decay))


def _norm_of_selection(size: int, epsilon: float | None, scales: bool) -> nn.Module:
    if epsilon is None:
        require(not scales, "selection_scales", scales, "False where selection_norm is None")
        return nn.Identity()
    require_positive(selection_norm=epsilon)
    return RMSNorm(size, epsilon) if scales else nn.RMSNorm(size, epsilon, elementwise_affine=False)
