"""Rotary attention with norms and an output gate, as Qwen3-Next's (Qiu et al. 2025, "Gated Attention for Large Language
Models", arXiv 2505.06708).
"""

import torch
from torch import Tensor, nn

from recurra.checks import require_positive
from recurra.mixers.base import register_mixer
from recurra.mixers.rotary_attention import RotaryAttention


@register_mixer("gated-attention")
class GatedAttention(RotaryAttention):
    """y_n = W_o (sigmoid(W_g x_n) * sum_m softmax_m(norm(q_n) . R_(m-n) norm(k_m) / sqrt(d_head)) v_m).

    Rotary attention with root mean square norms of queries and keys in each head, one scale for all heads, and a gate
    of the values. The state holds keys after their norm.

    Args:
        n_heads, n_kv_heads, d_head, rotated_share, window, rotation_base, output_bias, dropout: as in
            `rotary-attention`.
        norm_epsilon: added to the mean square in the norms.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        rotated_share: float = 1.0,
        window: int | None = 128,
        rotation_base: float = 10000.0,
        output_bias: bool = False,
        dropout: float = 0.0,
        norm_epsilon: float = 1e-6,
    ) -> None:
        require_positive(norm_epsilon=norm_epsilon)
        super().__init__(
            d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_head=d_head,
            rotated_share=rotated_share,
            window=window,
            rotation_base=rotation_base,
            output_bias=output_bias,
            dropout=dropout,
            qk_norm=norm_epsilon,
        )
        self.gate_projection = nn.Linear(d_model, n_heads * self.d_head, bias=False)

    def output(self, x: Tensor, y: Tensor) -> Tensor:
        """Gate, then project."""
        return super().output(x, torch.sigmoid(self.gate_projection(x)) * y)
