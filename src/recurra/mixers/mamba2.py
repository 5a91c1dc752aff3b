"""Mamba-2: state space duality (Dao & Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms
Through Structured State Space Duality", arXiv 2405.21060, sections 6 and 7).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require, require_at_least, require_heads, require_positive
from recurra.layers.convolution import ShortConvolution
from recurra.layers.norms import RMSNorm, at_least_float32, gated
from recurra.layers.state_space import inverse_softplus_of_steps, most_heads
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops.gate_loop.operator import gate_loop

_PUBLISHED_HEAD = 64  # channels


class Mamba2State(NamedTuple):
    """The states of the heads and the last inputs of the convolution (those of u, B and C), the oldest first."""

    h: Float[Tensor, "B H d_state d_head"]
    inputs: Float[Tensor, "B K_1 channels"]


@register_mixer("mamba2")
class Mamba2(Mixer):
    """y = W_o norm((SSD(u) + skip u) * SiLU(z)) with z, u, B, C, Delta = projections of x.

        h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t^T u_t,  SSD(u)_t = C_t h_t  in every head

    A = -exp(log_decay) is one number per head, and so is the transition; long sequences are computed by matrix products
    in chunks (`recurra.gate_loop`). u, B and C pass a short convolution and SiLU first; Delta = softplus(. + step_bias)
    is one step size per head. The heads of a group share B and C. The norm divides by the root mean square of each
    group's channels of u, after the gate.

    Equal to the authors' code (mamba_ssm/modules/mamba2.py of github.com/state-spaces/mamba) with its default options.
    Not implemented, and refused by the converter: upper limits of the step sizes (`dt_limit`, in transformers
    `time_step_limit`), projection biases, a convolution without bias, an MLP in parallel to the recurrence
    (`d_ssm`), and `D_has_hdim`.

    Initialisation is the authors': -A uniform from 1 to 16, skip = 1, step sizes at 0 log-uniform from min_step to
    max_step. Our choices: `n_heads` instead of a head size; padding has a step size of 0, which is a transition of 1;
    the bias of Delta is added in float32.

    Args:
        d_state: rows of a head's state, the channels of B and C in a group (the paper's N).
        d_conv: steps that the convolution sees, the step itself included.
        expand: channels of u are `expand * d_model` unless `d_inner` is given.
        n_heads: heads; if None, as many as fit with the published 64 channels or more, and at least one.
        n_groups: groups of heads; each group has its own B and C.
        min_step, max_step: range of the initial step sizes.
        norm_epsilon: added to the mean square in the norm.
        norm: "after" the gate or "before" it; None: no norm.
        d_inner: channels of u; `expand * d_model` if None.
        least_step: lower limit of the step sizes, as in Nemotron-H (arXiv 2504.03624).
    """

    skips_padding = True

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        d_conv: int = 4,
        expand: int = 2,
        n_heads: int | None = None,
        n_groups: int = 1,
        min_step: float = 0.001,
        max_step: float = 0.1,
        norm_epsilon: float = 1e-5,
        norm: str | None = "after",
        d_inner: int | None = None,
        least_step: float = 0.0,
    ) -> None:
        require_at_least(1, d_model=d_model, d_state=d_state, expand=expand, n_groups=n_groups)
        require_at_least(2, d_conv=d_conv)
        require_positive(norm_epsilon=norm_epsilon)
        require(norm in ("after", "before", None), "norm", norm, "'after', 'before' or None")
        d_inner = expand * d_model if d_inner is None else d_inner
        require_at_least(1, d_inner=d_inner)
        require_at_least(0, least_step=least_step)
        n_heads = most_heads(d_inner, _PUBLISHED_HEAD) if n_heads is None else n_heads
        require_heads(n_heads, **{"channels of u": d_inner})
        require(n_heads % n_groups == 0, "n_groups", n_groups, f"a divisor of n_heads = {n_heads}")
        d_selection = n_groups * d_state
        n_convolved = d_inner + 2 * d_selection
        h, inputs = StateSpec((n_heads, d_state, d_inner // n_heads)), StateSpec((d_conv - 1, n_convolved))
        super().__init__(d_model, Mamba2State, h=h, inputs=inputs)
        self.n_heads, self.n_groups, self.least_step = n_heads, n_groups, least_step
        self._projections, self._parts = [d_inner, n_convolved, n_heads], [d_inner, d_selection, d_selection]
        self.input_projection = nn.Linear(d_model, sum(self._projections), bias=False)
        self.convolution = ShortConvolution(n_convolved, d_conv)
        self.step_bias = nn.Parameter(inverse_softplus_of_steps(n_heads, min_step, max_step))
        self.log_decay = nn.Parameter(torch.log(1 + 15 * torch.rand(n_heads)))
        self.skip = nn.Parameter(torch.ones(n_heads))
        self.norm = None if norm is None else RMSNorm(d_inner, norm_epsilon, n_groups=n_groups)
        self._norm_is_last = norm == "after"
        self.output_projection = nn.Linear(d_inner, d_model, bias=False)

    def transition_parameters(self) -> set[nn.Parameter]:
        return {self.log_decay, self.step_bias}

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L H"], Float[Tensor, "B L H"]]:
        """Return exp(Delta_t A) of every head, and phases of 0."""
        magnitude = torch.exp(self._step_sizes(self._projected(x)[2], None) * self._eigenvalues())
        return magnitude, torch.zeros_like(magnitude)

    def mix(self, x: Tensor, state: Mamba2State, mask: Tensor | None) -> tuple[Tensor, Mamba2State]:
        z, convolved, step = self._projected(x)
        convolved, inputs = self.convolution(convolved, state.inputs, mask, silu=True)
        u, b, c = convolved.split(self._parts, -1)
        heads = u.unflatten(-1, (self.n_heads, -1))
        b, c = (part.unflatten(-1, (self.n_groups, -1)) for part in (b, c))
        step = self._step_sizes(step, mask)
        transition = torch.exp(step * self._eigenvalues())[..., None]
        y, h = gate_loop(c, b, step[..., None] * heads, transition, state=state.h)
        skip = at_least_float32(self.skip)[:, None].expand(heads.shape[2:]).flatten()
        y = gated(y.flatten(-2), z, self.norm, skip=(u, skip), after=self._norm_is_last)
        return self.output_projection(y), Mamba2State(h, inputs)

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """z, what the convolution takes, and Delta before its bias."""
        return self.input_projection(x).split(self._projections, -1)

    def _step_sizes(self, step: Tensor, mask: Tensor | None) -> Float[Tensor, "B L H"]:
        step = functional.softplus(at_least_float32(step) + at_least_float32(self.step_bias))
        return mask_fill(step.clamp_min(self.least_step) if self.least_step else step, mask, 0)

    def _eigenvalues(self) -> Float[Tensor, " H"]:
        return -torch.exp(at_least_float32(self.log_decay))
