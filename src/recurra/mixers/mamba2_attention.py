"""Mamba-2 and attention side by side, as in Falcon-H1 (Zuo et al. 2025, "Falcon-H1: A Family of Hybrid-Head Language
Models", arXiv 2507.22448, section 2.1).
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require_at_least
from recurra.mixers.base import Mixer, register_mixer
from recurra.mixers.mamba2 import Mamba2, Mamba2State
from recurra.mixers.rotary_attention import RotaryAttention, RotaryAttentionState


class Mamba2AttentionState(NamedTuple):
    """The state of Mamba-2, and that of rotary attention."""

    h: Float[Tensor, "B H d_state d_head"]
    inputs: Float[Tensor, "B K_1 channels"]
    keys: Float[Tensor, "B p G d_head"]
    values: Float[Tensor, "B p G d_head"]


class MambaAndAttention(Mixer):
    """A mixer that combines Mamba-2 and attention; its state contains the states of both."""

    masks_products = True

    def __init__(self, d_model: int, mamba: Mamba2, attention: RotaryAttention) -> None:
        specs = mamba.state_layout._asdict() | attention.state_layout._asdict()
        super().__init__(d_model, Mamba2AttentionState, **specs)
        self.mamba, self.attention = mamba, attention

    def transition_parameters(self) -> set[nn.Parameter]:
        return self.mamba.transition_parameters()

    def why_not_exportable(self) -> str:
        return self.attention.why_not_exportable()


@register_mixer("mamba2-attention")
class Mamba2Attention(MambaAndAttention):
    """y = Mamba2(x) + RotaryAttention(x): both read the same input, and add to the same residual stream.

    Args:
        d_state, d_conv, d_inner, n_groups, norm, norm_epsilon: as those of `mamba2`; d_inner is 2 d_model if None.
        n_mamba_heads: heads of Mamba-2, its `n_heads`.
        n_heads, n_kv_heads, d_head, rotated_share, window, rotation_base, dropout: as those of `rotary-attention`.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        d_conv: int = 4,
        d_inner: int | None = None,
        n_mamba_heads: int | None = None,
        n_groups: int = 1,
        norm: str | None = None,
        norm_epsilon: float = 1e-5,
        n_heads: int = 4,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        rotated_share: float = 1.0,
        window: int | None = 128,
        rotation_base: float = 10000.0,
        dropout: float = 0.0,
    ) -> None:
        require_at_least(1, n_mamba_heads=1 if n_mamba_heads is None else n_mamba_heads)
        mamba = Mamba2(
            d_model,
            d_state=d_state,
            d_conv=d_conv,
            d_inner=d_inner,
            n_heads=n_mamba_heads,
            n_groups=n_groups,
            norm=norm,
            norm_epsilon=norm_epsilon,
        )
        attention = RotaryAttention(
            d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_head=d_head,
            rotated_share=rotated_share,
            window=window,
            rotation_base=rotation_base,
            dropout=dropout,
        )
        super().__init__(d_model, mamba, attention)

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L H"], Float[Tensor, "B L H"]]:
        """Return those of Mamba-2."""
        return self.mamba.transition(x)

    def mix(self, x: Tensor, state: Mamba2AttentionState, mask: None) -> tuple[Tensor, Mamba2AttentionState]:
        recurrent, ours = self.mamba.mix(x, Mamba2State(*state[:2]), None)
        attended, theirs = self.attention.mix(x, RotaryAttentionState(*state[2:]), None)
        return recurrent + attended, Mamba2AttentionState(*ours, *theirs)
