"""Mamba-3: trapezoidal steps and a rotating state (Lahoti et al. 2026, "Mamba-3: Improved Sequence Modeling using
State Space Principles", arXiv 2603.15569).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import choose, require, require_at_least, require_heads
from recurra.layers.norms import RMSNorm, at_least_float32, gated
from recurra.layers.positions import turn, turned
from recurra.layers.state_space import inverse_softplus_of_steps, most_heads, spread_over_heads
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops._operator import without_autocast
from recurra.ops.gate_loop.operator import gate_loop

_PUBLISHED_HEAD = 64  # channels
_LEAST_DECAY = 1e-4


def _heavy_tailed(x: Tensor) -> Tensor:
    """1 + x from 0 on and 1 / (1 - x) below: positive, and with the slope 1 at 0."""
    below = x.clamp(max=0)
    return x - below + torch.reciprocal(1 - below)


_DECAYS: dict[str, Callable[[Tensor], Tensor]] = {"heavy-tail": _heavy_tailed, "softplus": functional.softplus}


class Mamba3State(NamedTuple):
    """The states of the heads, as the newest step sees them, and B and u of that step, which the next one also reads.

    No angle is stored, so nothing grows with the stream."""

    h: Float[Tensor, "B H d_state d_head"]
    b: Float[Tensor, "B H d_state"]
    u: Float[Tensor, "B H d_head"]


@register_mixer("mamba3")
class Mamba3(Mixer):
    """y = W_o ((SSM(u) + skip u) * SiLU(z)) with z, u, B, C, Delta, A, lambda, theta = projections of x.

        h_t = R_t exp(Delta_t A_t) (h_{t-1} + (1 - lambda_t) Delta_t B_{t-1}^T u_{t-1}) + lambda_t Delta_t B_t^T u_t

    in every head, and SSM(u)_t = C_t h_t. R_t rotates the first rows of h, in pairs, back by the angles pi Delta_t
    tanh(theta_t); with exp(Delta_t A_t), it is an input-controlled complex transition. lambda_t in (0, 1) weighs the
    two ends of a step (1 is Mamba-2's rule, 1/2 the trapezoidal one), which replaces the short convolution.

    Equal to the authors' code (mamba_ssm/modules/mamba3.py of github.com/state-spaces/mamba at e9594ce), SISO and
    without a norm before W_o: Delta = softplus(. + step_bias), A = -f(.), at most -0.0001, and lambda = sigmoid(.), one
    a head; theta shared by the heads. f(x) is 1 + x for x >= 0 and 1 / (1 - x) below; it was softplus before June 2026
    (c69aaab). B and C are normalised by their root mean square, shared by the heads of a group, and get a bias of each
    head, which starts at 1. The skip starts at 1, step sizes at 0 log-uniform from min_step to max_step.

    Not implemented: the MIMO form, and the norm before W_o.

    Our choices: a call rotates B and C relative to its first step and rotates the returned state back by all angles of
    the call, so products stay real and no angle is stored. The angles are summed in float64. B_t^T u_t, which counts in
    step t and again in the next one, is written once, at the next step, with both weights; C_t B_t^T u_t is added to
    y_t separately. Padding has a step size of 0.

    Args:
        d_state: rows of a head's state, the channels of B and C in a group.
        expand: channels of u are `expand * d_model`.
        n_heads: heads; if None, as many as fit with the published 64 channels or more, and at least one.
        n_groups: groups of heads; each group has its own B and C.
        rope_fraction: share of the rows that rotate, 0.5 or 1.
        decay_activation: f, "heavy-tail" or "softplus".
        min_step, max_step: range of the initial step sizes.
    """

    skips_padding = True

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        expand: int = 2,
        n_heads: int | None = None,
        n_groups: int = 1,
        rope_fraction: float = 0.5,
        decay_activation: str = "heavy-tail",
        min_step: float = 0.001,
        max_step: float = 0.1,
    ) -> None:
        require_at_least(1, d_model=d_model, d_state=d_state, expand=expand, n_groups=n_groups)
        d_inner = expand * d_model
        n_heads = most_heads(d_inner, _PUBLISHED_HEAD) if n_heads is None else n_heads
        require_heads(n_heads, **{"expand * d_model": d_inner})
        require(n_heads % n_groups == 0, "n_groups", n_groups, f"a divisor of n_heads = {n_heads}")
        require(rope_fraction in (0.5, 1.0), "rope_fraction", rope_fraction, "one of 0.5, 1.0")
        multiple = int(2 / rope_fraction)
        require(d_state % multiple == 0, "d_state", d_state, f"a multiple of {multiple}: rows turn in pairs")
        d_head = d_inner // n_heads
        h, b, u = StateSpec((n_heads, d_state, d_head)), StateSpec((n_heads, d_state)), StateSpec((n_heads, d_head))
        super().__init__(d_model, Mamba3State, h=h, b=b, u=u)
        self.n_heads, self.n_groups, self.n_pairs = n_heads, n_groups, d_state // multiple
        self._decay = choose("decay_activation", _DECAYS, decay_activation)
        d_selection = n_groups * d_state
        self._projections = [d_inner, d_inner, d_selection, d_selection, *3 * [n_heads], self.n_pairs]
        self.input_projection = nn.Linear(d_model, sum(self._projections), bias=False)
        self.step_bias = nn.Parameter(inverse_softplus_of_steps(n_heads, min_step, max_step))
        self.b_norm, self.c_norm = RMSNorm(d_state), RMSNorm(d_state)
        self.b_bias = nn.Parameter(torch.ones(n_heads, d_state))
        self.c_bias = nn.Parameter(torch.ones(n_heads, d_state))
        self.skip = nn.Parameter(torch.ones(n_heads))
        self.output_projection = nn.Linear(d_inner, d_model, bias=False)

    def transition_parameters(self) -> set[nn.Parameter]:
        return {self.step_bias}

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L _"], Float[Tensor, "B L _"]]:
        """Return exp(Delta_t A_t) and the rotation angle of a step in radians, for every pair of rows that rotates."""
        *_, step, decay, _, theta = self._projected(x)
        step, magnitude = self._timed(step, decay, None)
        angles = self._angles(step, theta)
        return magnitude.expand(angles.shape).flatten(2), -angles.flatten(2)

    def mix(self, x: Tensor, state: Mamba3State, mask: Tensor | None) -> tuple[Tensor, Mamba3State]:
        z, u, b, c, step, decay, weight, theta = self._projected(x)
        u = at_least_float32(u).unflatten(-1, (self.n_heads, -1))
        b, c = self._selected(b, self.b_norm, self.b_bias), self._selected(c, self.c_norm, self.c_bias)
        step, transition = self._timed(step, decay, mask)
        weight = torch.sigmoid(at_least_float32(weight))[..., None]
        angles = _from_the_start(self._angles(step, theta))
        now, again = weight * step, _of_next_steps((1 - weight) * step * transition, mask, 0.0)
        scale = now * _of_next_steps(transition, mask, 1.0)[:, 1:] + again[:, 1:]
        b_turned, c_turned, dots = turned(b, c, angles, scale)
        keys, values = _of_steps_before(again[:, 0] * state.b, b_turned, mask), _of_steps_before(state.u, u, mask)
        with without_autocast(x):  # its matrix products would round sums to bfloat16
            y, h = gate_loop(c_turned, mask_fill(keys, mask, 0), values, transition, state=state.h)
        written = _last_counted(torch.zeros_like(state.b), b_turned, mask)
        h = h + written[..., None] * _last_counted(state.u, u, mask)[:, :, None]
        h = turn(h.transpose(-1, -2), -angles[:, -1, :, None])
        y = y + (at_least_float32(self.skip)[:, None] + now * dots) * u
        y = gated(y.flatten(-2), z)
        last = Mamba3State(h.transpose(-1, -2), _last_counted(state.b, b, mask), _last_counted(state.u, u, mask))
        return self.output_projection(y), last

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """z, u, B, C, and Delta, A, lambda and theta before their activations."""
        return self.input_projection(x).split(self._projections, -1)

    def _selected(self, x: Tensor, norm: nn.Module, bias: Tensor) -> Float[Tensor, "B L H d_state"]:
        """B or C of every head."""
        return spread_over_heads(norm(x.unflatten(-1, (self.n_groups, -1))), self.n_heads) + at_least_float32(bias)

    def _timed(self, step: Tensor, decay: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Delta and exp(Delta A), (B, L, H, 1)."""
        step = mask_fill(functional.softplus(at_least_float32(step) + at_least_float32(self.step_bias)), mask, 0)
        eigenvalue = -self._decay(at_least_float32(decay)).clamp(min=_LEAST_DECAY)
        return step[..., None], torch.exp(step * eigenvalue)[..., None]

    def _angles(self, step: Tensor, theta: Tensor) -> Float[Tensor, "B L H pairs"]:
        """The angles by which every step turns the state back."""
        return math.pi * step * torch.tanh(at_least_float32(theta))[:, :, None]


def _from_the_start(angles: Float[Tensor, "B L H pairs"]) -> Float[Tensor, "B L H pairs"]:
    """The angles between the state and each step; those of several steps within half a turn of 0.

    Angles to the last step would let later steps change earlier results by rounding.
    """
    if not torch.compiler.is_compiling() and angles.shape[1] == 1:  # compiled, it would be one graph too many
        return angles
    sums = angles.double().cumsum(1)  # float32 would lose digits of long sums
    return (sums - 2 * math.pi * torch.round(sums / (2 * math.pi))).to(angles.dtype)


def _of_next_steps(
    values: Float[Tensor, "B L H 1"], mask: Bool[Tensor, "B L"] | None, end: float
) -> Float[Tensor, "B L_1 H 1"]:
    """The values of the first counted step after the state, and after each step; `end` if there is none."""
    values = functional.pad(values, (0, 0, 0, 0, 0, 1), value=end)
    if mask is None:
        return values
    length = mask.shape[1]
    steps = torch.arange(length, device=mask.device).expand(mask.shape)
    counted = functional.pad(steps.masked_fill(~mask, length), (0, 1), value=length)
    nearest = counted.flip(1).cummin(1).values.flip(1)
    return values.gather(1, nearest[..., None, None].expand(values.shape))


def _of_steps_before(
    first: Float[Tensor, "B *rest"], steps: Float[Tensor, "B L *rest"], mask: Bool[Tensor, "B L"] | None
) -> Float[Tensor, "B L *rest"]:
    """What the counted step before each step has; `first` before the first."""
    known = torch.cat([first[:, None], steps], 1)
    if mask is None:
        return known[:, :-1]
    numbers = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    newest = functional.pad((mask * numbers).cummax(1).values, (1, 0))[:, :-1]
    return known[torch.arange(len(newest), device=mask.device)[:, None], newest]


def _last_counted(
    before: Float[Tensor, "B *rest"], steps: Float[Tensor, "B L *rest"], mask: Bool[Tensor, "B L"] | None
) -> Float[Tensor, "B *rest"]:
    """The value of the last counted step, or the one before; in memory of its own."""
    if mask is None:
        return steps[:, -1].clone()
    numbers = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (mask * numbers).amax(1)
    known = torch.cat([before[:, None], steps], 1)
    return known[torch.arange(len(last), device=mask.device), last]
