"""Lightning attention: linear attention with one fixed decay per head, as in MiniMax-01 (Li et al. 2025, arXiv
2501.08313, section 2.2; Qin et al. 2024, "Lightning Attention-2", arXiv 2401.04658).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_positive
from recurra.layers.attention import head_size
from recurra.layers.norms import RMSNorm, at_least_float32
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops.gate_loop.operator import gate_loop


class LightningAttentionState(NamedTuple):
    """h_n = sum_{m<=n} a^(n-m) k_m^T v_m in every head."""

    h: Float[Tensor, "B H d_head d_head"]


@register_mixer("lightning-attention")
class LightningAttention(Mixer):
    """y_n = W_o (sigmoid(W_g x_n) * norm(q_n h_n)), h_n = a h_{n-1} + k_n^T v_n with q, k, v = SiLU(W x).

    The norm divides by the root mean square of all heads' channels. The decay a = exp(-exp(log_rate)) is one number per
    head: exp(log_rate) = 2^(-8 h / n_heads) in head h = 1, 2, ..., ALiBi's slopes. In MiniMax-01, these rates are
    constants that fall to 0 from the first layer to the last. Here they are parameters, and every layer starts at the
    first layer's values.

    Args:
        n_heads: heads.
        d_head: channels of a head; d_model / n_heads if None.
        norm_epsilon: added to the mean square in the norm.
    """

    skips_padding = True

    def __init__(
        self, d_model: int, *, n_heads: int = 4, d_head: int | None = None, norm_epsilon: float = 1e-6
    ) -> None:
        d_head = head_size(d_model, n_heads, d_head)
        require_positive(norm_epsilon=norm_epsilon)
        super().__init__(d_model, LightningAttentionState, h=StateSpec((n_heads, d_head, d_head)))
        inner, self.n_heads = n_heads * d_head, n_heads
        self.log_rate = nn.Parameter(torch.arange(1, n_heads + 1) * (-8 * math.log(2) / n_heads))
        self.qkv = nn.Linear(d_model, 3 * inner, bias=False)
        self.gate_projection = nn.Linear(d_model, inner, bias=False)
        self.norm = RMSNorm(inner, norm_epsilon)
        self.output_projection = nn.Linear(inner, d_model, bias=False)

    def transition_parameters(self) -> set[nn.Parameter]:
        return {self.log_rate}

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L H"], Float[Tensor, "B L H"]]:
        """Return each head's decay and its phase, 0; both are the same at every step."""
        decay = self._decay().expand(*x.shape[:2], self.n_heads)
        return decay, torch.zeros_like(decay)

    def _decay(self) -> Float[Tensor, " H"]:
        return torch.exp(-torch.exp(at_least_float32(self.log_rate)))

    def mix(
        self, x: Tensor, state: LightningAttentionState, mask: Tensor | None
    ) -> tuple[Tensor, LightningAttentionState]:
        heads = at_least_float32(functional.silu(self.qkv(x))).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = heads.unbind(2)
        decay = mask_fill(self._decay().to(v.dtype)[:, None].expand(*v.shape[:3], 1), mask, 1)
        y, h = gate_loop(q, k, v, decay, state=state.h)  # padded inputs are 0, so their keys are, too
        y = torch.sigmoid(self.gate_projection(x)) * self.norm(y.flatten(2))
        return self.output_projection(y.to(x.dtype)), LightningAttentionState(h)
