"""Gated linear attention (Yang et al. 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training",
arXiv 2312.06635).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_heads, require_positive, require_whole_number
from recurra.layers.norms import RMSNorm, at_least_float32, gated
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops._operator import without_autocast
from recurra.ops.gate_loop.operator import gate_loop


class GatedLinearAttentionState(NamedTuple):
    """S_t = diag(a_t) S_{t-1} + k_t^T v_t."""

    h: Float[Tensor, "B H d_k d_v"]


@register_mixer("gla")
class GatedLinearAttention(Mixer):
    """y_t = (SiLU(W_g x_t) * norm(q_t S_t)) W_o, S_t = diag(a_t) S_{t-1} + k_t^T v_t (section 4.4).

    q, k, v = projections of x, q divided by sqrt(d_k). The transition is one number per key channel, from a low-rank
    projection with a temperature that keeps it near 1: a_t = sigmoid(W_2 W_1 x_t + b)^(1 / 16). This is GateLoop with
    real transitions on the key side.

    Our choice: the norm is the published code's, a root mean square norm of each head with one scale for all heads (the
    paper writes layer norm); only W_2 has a bias, as there.

    Args:
        d_qk: channels of queries, keys and transitions over all heads; half of `d_model`, as published, if None.
        d_v: channels of the values over all heads; `d_model` if None.
        n_heads: heads.
        gate_rank: rank of the transition's projection.
        gate_temperature: root taken of the sigmoid (the paper's tau).
    """

    skips_padding = True
    is_linear_recurrence = True

    def __init__(
        self,
        d_model: int,
        *,
        d_qk: int | None = None,
        d_v: int | None = None,
        n_heads: int = 4,
        gate_rank: int = 16,
        gate_temperature: float = 16.0,
    ) -> None:
        d_qk, d_v = d_model // 2 if d_qk is None else d_qk, d_model if d_v is None else d_v
        require_heads(n_heads, d_qk=d_qk, d_v=d_v)
        require_whole_number(1, gate_rank=gate_rank)
        require_positive(gate_temperature=gate_temperature)
        super().__init__(d_model, GatedLinearAttentionState, h=StateSpec((n_heads, d_qk // n_heads, d_v // n_heads)))
        self.d_qk, self.d_v, self.n_heads, self.gate_temperature = d_qk, d_v, n_heads, gate_temperature
        self.qkvg = nn.Linear(d_model, 2 * d_qk + 2 * d_v, bias=False)
        self.gate_projection = nn.Sequential(nn.Linear(d_model, gate_rank, bias=False), nn.Linear(gate_rank, d_qk))
        self.norm = RMSNorm(d_v // n_heads)
        self.output_projection = nn.Linear(d_v, d_model, bias=False)

    def transition_parameters(self) -> set[nn.Parameter]:
        return set(self.gate_projection.parameters())

    def transition(
        self, x: Float[Tensor, "B L d_model"]
    ) -> tuple[Float[Tensor, "B L d_qk"], Float[Tensor, "B L d_qk"]]:
        """Return a and its phase, which is 0, for every key channel."""
        log_sigmoid = functional.logsigmoid(at_least_float32(self.gate_projection(x)))
        a = torch.exp(log_sigmoid / self.gate_temperature)
        return a, torch.zeros_like(a)

    def mix(
        self, x: Tensor, state: GatedLinearAttentionState, mask: Tensor | None
    ) -> tuple[Tensor, GatedLinearAttentionState]:
        *qkv, gate = self.qkvg(x).split([self.d_qk, self.d_qk, self.d_v, self.d_v], -1)
        a, _ = self.transition(x)
        q, k, v, a = (at_least_float32(part).unflatten(-1, (self.n_heads, -1)) for part in (*qkv, a))
        with without_autocast(x):  # its matrix products would round sums to bfloat16
            q, k, a = q * q.shape[-1] ** -0.5, mask_fill(k, mask, 0), mask_fill(a, mask, 1)
            y, h = self.recur(lambda h0: gate_loop(q, k, v, a, state=h0), a, state.h)
        y = gated(y.flatten(-2), gate, self.norm)
        return self.output_projection(y), GatedLinearAttentionState(h)
