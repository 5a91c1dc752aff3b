"""Zamba2's hybrid layer: shared attention and a shared feed-forward network, before each layer's Mamba-2 (Glorioso et
al. 2024, "The Zamba2 Suite", arXiv 2411.15242, section 2).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_at_least, require_positive
from recurra.layers.feed_forward import TiedLinear
from recurra.layers.norms import RMSNorm
from recurra.mixers.base import Mixer, register_mixer
from recurra.mixers.mamba2 import Mamba2, Mamba2State
from recurra.mixers.mamba2_attention import Mamba2AttentionState, MambaAndAttention
from recurra.mixers.rotary_attention import RotaryAttention, RotaryAttentionState


class _Adapted(nn.Module):
    """W x + B_i A_i x: W may be shared between layers; each layer has its own B_i A_i for each part i of the rows."""

    def __init__(self, n_in: int, sizes: Sequence[int], rank: int | None) -> None:
        super().__init__()
        self.linear = TiedLinear(n_in, sum(sizes), bias=False)
        pairs = [] if rank is None else [(n_in, rank, size) for size in sizes]
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(n, rank, bias=False), nn.Linear(rank, size, bias=False)) for n, rank, size in pairs
        )

    def forward(self, x: Float[Tensor, "B L n_in"]) -> Float[Tensor, "B L n_out"]:
        added = [adapter(x) for adapter in self.adapters]
        return self.linear(x) + torch.cat(added, -1) if added else self.linear(x)


@register_mixer("zamba2")
class Zamba2(MambaAndAttention):
    """y = Mamba2(norm(x + W F(norm(attention(norm([x, e])))))), where e is the model's token embedding.

    x is the residual stream, before any norm. F(u) = W_down (GELU(W_gate u) * W_up u). The attention reads 2 d_model
    channels, and its scores are divided by sqrt(d_head / 2). In a model, every `n_shared`-th `zamba2` mixer shares
    attention and F, with their norms; each has its own Mamba-2 and W, and adds products of rank `rank` to W_gate and
    W_up. A mixer outside a model uses x as e.

    Args:
        d_state, d_conv, d_inner, n_groups, least_step: as in `mamba2`; d_inner is 2 d_model if None.
        n_mamba_heads: heads of Mamba-2 (`n_heads` in `mamba2`).
        n_heads, n_kv_heads, rotated_share, window, rotation_base, dropout: as in `rotary-attention`; a head has
            2 d_model / n_heads channels.
        d_hidden: channels of W_gate u; 4 d_model if None.
        rank: rank of the matrices that each layer adds to the shared ones.
        adapts_attention: whether layers also add to the shared projections to queries, keys and values.
        n_shared: number of shared attention blocks in a model; layers use them in turn.
        norm_epsilon: added to the mean square in the norms, except in Mamba-2's own norm, which adds 1e-5.
        layer: number of this mixer among a model's `zamba2` mixers, from 1, set by the model; None outside a model.
    """

    takes_stream = True
    transition_looks_back = True

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        d_conv: int = 4,
        d_inner: int | None = None,
        n_mamba_heads: int | None = None,
        n_groups: int = 1,
        least_step: float = 0.0,
        n_heads: int = 4,
        n_kv_heads: int | None = None,
        rotated_share: float = 1.0,
        window: int | None = 128,
        rotation_base: float = 10000.0,
        dropout: float = 0.0,
        d_hidden: int | None = None,
        rank: int = 8,
        adapts_attention: bool = False,
        n_shared: int = 1,
        norm_epsilon: float = 1e-5,
        layer: int | None = None,
    ) -> None:
        d_hidden = 4 * d_model if d_hidden is None else d_hidden
        require_at_least(1, d_model=d_model, d_hidden=d_hidden, rank=rank, n_shared=n_shared)
        given = {"n_mamba_heads": n_mamba_heads, "layer": layer}
        require_at_least(1, **{name: number for name, number in given.items() if number is not None})
        require_positive(norm_epsilon=norm_epsilon)
        mamba = Mamba2(
            d_model,
            d_state=d_state,
            d_conv=d_conv,
            d_inner=d_inner,
            n_heads=n_mamba_heads,
            n_groups=n_groups,
            least_step=least_step,
        )
        attention = RotaryAttention(
            2 * d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            rotated_share=rotated_share,
            window=window,
            rotation_base=rotation_base,
            dropout=dropout,
            query_scale=2**0.5,
        )
        super().__init__(d_model, mamba, attention)
        self.n_shared, self.layer = n_shared, layer
        self.d_carried = 0 if layer is None else d_model
        self.d_output = d_model + self.d_carried
        sizes = [n * attention.d_head for n in (n_heads, attention.n_kv_heads, attention.n_kv_heads)]
        attention.qkv = _Adapted(2 * d_model, sizes, rank if adapts_attention else None)  # type: ignore[assignment]
        attention.output_projection = TiedLinear(n_heads * attention.d_head, d_model, bias=False)  # type: ignore
        self.norm_attention = RMSNorm(2 * d_model, norm_epsilon)
        self.norm_feed_forward = RMSNorm(d_model, norm_epsilon)
        self.gate_up = _Adapted(d_model, [2 * d_hidden], rank)
        self.down = TiedLinear(d_hidden, d_model, bias=False)
        self.projection = nn.Linear(d_model, d_model, bias=False)
        self.norm_mamba = RMSNorm(d_model, norm_epsilon)

    @property
    def output_projection(self) -> nn.Module:
        """The layer that writes to the residual stream."""
        return self.mamba.output_projection

    def share(self, earlier: Sequence[Mixer]) -> None:
        if len(earlier) < self.n_shared:
            return
        first: Zamba2 = earlier[len(earlier) % self.n_shared]  # type: ignore[assignment]
        for name in ("norm_attention", "norm_feed_forward", "down"):
            setattr(self, name, getattr(first, name))
        self.attention.qkv.linear = first.attention.qkv.linear
        self.attention.output_projection = first.attention.output_projection
        self.gate_up.linear = first.gate_up.linear

    def transition(
        self, x: Float[Tensor, "B L d_in"], state: Mamba2AttentionState | None
    ) -> tuple[Float[Tensor, "B L H"], Float[Tensor, "B L H"]]:
        """Return Mamba-2's transition."""
        state = self.initial_state(len(x)) if state is None else state
        return self.mamba.transition(self._entering_mamba(x, state)[0])

    def mix(self, x: Tensor, state: Mamba2AttentionState, mask: None) -> tuple[Tensor, Mamba2AttentionState]:
        entering, theirs = self._entering_mamba(x, state)
        y, ours = self.mamba.mix(entering, Mamba2State(*state[:2]), None)
        return torch.cat([y, x[..., self.d_model :]], -1), Mamba2AttentionState(*ours, *theirs)

    def _entering_mamba(self, x: Tensor, state: Mamba2AttentionState) -> tuple[Tensor, RotaryAttentionState]:
        x, embedded = x[..., : self.d_model], x[..., x.shape[-1] - self.d_model :]
        both = self.norm_attention(torch.cat([x, embedded], -1)).to(x.dtype)
        seen, attended = self.attention.mix(both, RotaryAttentionState(*state[2:]), None)
        gate, up = self.gate_up(self.norm_feed_forward(seen).to(x.dtype)).chunk(2, -1)
        added = self.projection(self.down(functional.gelu(gate) * up))
        return self.norm_mamba(x + added).to(x.dtype), attended
