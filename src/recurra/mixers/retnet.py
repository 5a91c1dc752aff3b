"""Multi-scale retention, RetNet's time-mixing layer (Sun et al., arXiv 2307.08621, sections 2.1 and 2.2)."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require, require_heads
from recurra.layers.norms import at_least_float32
from recurra.layers.positions import phases, rotate
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops.gate_loop.operator import gate_loop


class RetentionState(NamedTuple):
    """h_n = sum_{m<=n} gamma^(n-m) rotate(k_m, (m - n) theta)^T v_m: keys are rotated relative to the newest step n.

    No position is stored, so nothing grows with the stream."""

    h: Float[Tensor, "B H d_k d_v"]


@register_mixer("retnet")
class Retention(Mixer):
    """y_n = (swish(W_g x_n) * norm(q_n sum_{m<=n} a^(n-m) k_m^T v_m)) W_o with a = gamma exp(i theta) (GateLoop (11)).

    gamma_h = 1 - 2^(-5-h) in head h = 0, 1, ...; theta are the fixed phases of xPos (GateLoop section 2.2). q, k,
    v = projections of x, k divided by sqrt(d_k). The norm is a group norm of each step, one group per head.

    Only the modulus of a is the transition of the recurrence, one real number per head. The phase goes into q and k,
    which are rotated relative to the last step of the call; between two calls, the state is rotated.

    Of the paper's three normalisations of the scores we keep 1 / sqrt(d_k). The other two divide a head's output at a
    step by one positive number, which the group norm cancels up to its epsilon. The group norm has no scale and shift,
    and the projections have no biases, as in the published code.

    Args:
        d_qk: channels of queries and keys over all heads; `d_model` if None.
        d_v: channels of the values over all heads; twice `d_model`, as published, if None.
        n_heads: heads; published models have d_qk / 256. More than 19 are useless: in float32, their gamma is 1.
    """

    skips_padding = True

    def __init__(self, d_model: int, *, d_qk: int | None = None, d_v: int | None = None, n_heads: int = 4) -> None:
        d_qk, d_v = d_model if d_qk is None else d_qk, 2 * d_model if d_v is None else d_v
        require_heads(n_heads, d_qk=d_qk, d_v=d_v)
        d_k = d_qk // n_heads
        require(d_k % 2 == 0, "d_qk / n_heads", d_k, "an even number of key channels a head: they rotate in pairs")
        require(d_v > n_heads, "d_v", d_v, f"at least 2 channels a head for the group norm, {2 * n_heads} in all")
        super().__init__(d_model, RetentionState, h=StateSpec((n_heads, d_k, d_v // n_heads)))
        self.d_qk, self.d_v, self.n_heads, self.d_k = d_qk, d_v, n_heads, d_k
        self.qkvg = nn.Linear(d_model, 2 * d_qk + 2 * d_v, bias=False)
        self.output_projection = nn.Linear(d_v, d_model, bias=False)

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L _"], Float[Tensor, "B L _"]]:
        """Return gamma and theta in radians for every head and key pair: the same at every step."""
        theta = phases(torch.ones((), dtype=torch.int64, device=x.device), self.d_k)
        gammas, shape = self._gammas(at_least_float32(x)), (*x.shape[:2], self.n_heads, len(theta))
        return gammas[:, None].expand(shape).flatten(2), theta.to(gammas.dtype).expand(shape).flatten(2)

    def mix(self, x: Tensor, state: RetentionState, mask: Tensor | None) -> tuple[Tensor, RetentionState]:
        *qkv, gate = self.qkvg(x).split([self.d_qk, self.d_qk, self.d_v, self.d_v], -1)
        q, k, v = (at_least_float32(part).unflatten(-1, (self.n_heads, -1)) for part in qkv)
        positions, n_steps = self._positions(x, mask)
        angles = phases(positions, self.d_k)[..., None, :]
        k = mask_fill(rotate(k * self.d_k**-0.5, angles), mask, 0)
        h = self._turned_on(state.h, n_steps)
        decay = mask_fill(self._gammas(v)[:, None].expand(*v.shape[:3], 1), mask, 1)
        y, h = gate_loop(rotate(q, angles), k, v, decay, state=h)
        y = functional.layer_norm(y, y.shape[-1:])  # of a head's channels: the group norm of a step
        y = (y.flatten(-2) * functional.silu(gate)).to(x.dtype)
        return self.output_projection(y), RetentionState(h)

    def _positions(self, x: Tensor, mask: Tensor | None) -> tuple[Int[Tensor, "#B L"], Int[Tensor, " #B"]]:
        """Minus the counted steps of x after each step, and the number of counted steps of every sequence."""
        if mask is None:
            n_steps = torch.full((1,), x.shape[1], device=x.device)
            return torch.arange(1 - x.shape[1], 1, device=x.device)[None], n_steps
        return mask.cumsum(1) - mask.sum(1, keepdim=True), mask.sum(1)

    def _turned_on(self, h: Tensor, n_steps: Int[Tensor, " #B"]) -> Tensor:
        """The state as it is seen `n_steps` later, but for its decay."""
        angles = phases(-n_steps, self.d_k)[:, None, None]
        return rotate(h.transpose(-1, -2), angles).transpose(-1, -2)

    def _gammas(self, like: Tensor) -> Float[Tensor, " H"]:
        exponents = -5.0 - torch.arange(self.n_heads, dtype=like.dtype, device=like.device)
        return 1.0 - torch.exp2(exponents)
