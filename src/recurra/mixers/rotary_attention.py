"""Causal softmax attention with rotary positions over a sliding window (Vaswani et al., arXiv 1706.03762, section 3.2;
rotary positions: Su et al., arXiv 2104.09864, section 3.2; keys shared by heads: Ainslie et al., arXiv 2305.13245).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import choose, require, require_at_least, require_positive, require_probability
from recurra.layers.attention import (
    append_to_cache,
    cache_limit,
    head_size,
    trim_cache,
    windowed_attention,
)
from recurra.layers.norms import RMSNorm, at_least_float32
from recurra.layers.positions import phases, rotate
from recurra.layers.quantization import dequantized, quantized
from recurra.mixers.base import Dim, Mixer, StateSpec, register_mixer


class RotaryAttentionState(NamedTuple):
    """Keys, not rotated, and values of the last p steps, p at most window - 1; all steps if there is no window."""

    keys: Float[Tensor, "B p G d_head"]
    values: Float[Tensor, "B p G d_head"]


class _NormOfAllHeads(RMSNorm):
    """The norm over the channels of all heads together, each with its own scale."""

    def forward(self, x: Float[Tensor, "B L H d_head"]) -> Float[Tensor, "B L H d_head"]:
        return super().forward(x.flatten(2)).view(x.shape)


_QK_NORMS: dict[str, Callable[[int, int, float], nn.Module]] = {
    "head": lambda n_heads, d_head, epsilon: RMSNorm(d_head, epsilon),
    "all": lambda n_heads, d_head, epsilon: _NormOfAllHeads(n_heads * d_head, epsilon),
}


@register_mixer("rotary-attention")
class RotaryAttention(Mixer):
    """y_n = W_o sum_m softmax_m(q_n . R_(m-n) k_m / sqrt(d_head)) v_m, R_t a rotation of channel pairs by t theta_i.

    m runs over the last `window` steps up to n, wherever the stream is cut. Only differences of positions matter, so
    each call numbers the steps that it sees from 0.

    Args:
        n_heads: heads of the queries.
        n_kv_heads: heads of the keys and values, G, each shared by n_heads / G heads of queries; `n_heads` if None.
        d_head: channels of a head; d_model / n_heads if None.
        rotated_share: share of a head's channels that are rotated, starting with the first: an even number. With 0, the
            layer has no positions, as in Jamba (arXiv 2403.19887), where the recurrent layers encode them.
        rotation_base: base of the angles theta_i = base^(-2i / rotated channels).
        output_bias: whether the output projection has a bias; the others have none.
        window: number of steps that a step attends to, itself included. None keeps the keys and values of the whole
            stream: the state and the time per step then grow with every step.
        dropout: probability of dropping an attention weight.
        qk_norm: epsilon of a root mean square norm of queries and keys in each head, before they are rotated, with one
            scale for all heads, as in LFM2 (arXiv 2511.23404). The state then contains normalised keys. None: no norm.
        qk_norm_over: "head", or "all" for a norm over the channels of all heads together, with a scale for each
            channel, as in OLMo 2 (arXiv 2501.00656).
        query_scale: multiplies queries, in addition to 1 / sqrt(d_head).
    """

    masks_products = True

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
        qk_norm: float | None = None,
        query_scale: float = 1.0,
        qk_norm_over: str = "head",
    ) -> None:
        d_head = head_size(d_model, n_heads, d_head)
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        require_at_least(1, n_kv_heads=n_kv_heads)
        require(n_heads % n_kv_heads == 0, "n_kv_heads", n_kv_heads, f"a divisor of n_heads = {n_heads}")
        require(0 <= rotated_share <= 1, "rotated_share", rotated_share, "a share from 0 to 1")
        n_rotated = int(d_head * rotated_share)
        require_positive(rotation_base=rotation_base, query_scale=query_scale)
        even = n_rotated > 0 and n_rotated % 2 == 0
        require(
            even or rotated_share == 0, "rotated channels a head", n_rotated, "an even number: they rotate in pairs"
        )
        require_probability(dropout=dropout)
        if qk_norm is not None:
            require_positive(qk_norm=qk_norm)
        past = StateSpec((Dim("p", cache_limit(window)), n_kv_heads, d_head))
        super().__init__(d_model, RotaryAttentionState, keys=past, values=past)
        self.n_heads, self.n_kv_heads, self.d_head, self.n_rotated = n_heads, n_kv_heads, d_head, n_rotated
        self.window, self.dropout, self.rotation_base = window, dropout, rotation_base
        self.query_scale = query_scale
        self.qkv = nn.Linear(d_model, (n_heads + 2 * n_kv_heads) * d_head, bias=False)
        self.output_projection = nn.Linear(n_heads * d_head, d_model, bias=output_bias)
        norm, heads = choose("qk_norm_over", _QK_NORMS, qk_norm_over), (n_heads, n_kv_heads)
        self.query_norm, self.key_norm = (nn.Identity() if qk_norm is None else norm(n, d_head, qk_norm) for n in heads)

    def mix(self, x: Tensor, state: RotaryAttentionState, mask: None) -> tuple[Tensor, RotaryAttentionState]:
        y, state = self.attend(*self.project(x), state)
        return self.output(x, y.flatten(2)), state

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, state: RotaryAttentionState
    ) -> tuple[Tensor, RotaryAttentionState]:
        """Attend to the steps in the state and the new ones: values (B, L, H, d_head), and the next state."""
        new = RotaryAttentionState(at_least_float32(keys), at_least_float32(values))
        codes = self.state_layout.keys.codes
        known = append_to_cache(
            state, new if codes is None else RotaryAttentionState(*(quantized(x, codes) for x in new))
        )
        seen = known if codes is None else [dequantized(part, self.d_head) for part in known]
        y = self._attend(at_least_float32(queries), *seen, dtype=queries.dtype)
        return y, trim_cache(known, self.window)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, L, H, d_head), keys and values (B, L, G, d_head), normalised but not rotated."""
        heads = [self.n_heads, self.n_kv_heads, self.n_kv_heads]
        queries, keys, values = self.qkv(x).unflatten(-1, (-1, self.d_head)).split(heads, 2)
        return self.query_norm(queries).to(values.dtype), self.key_norm(keys), values

    def output(self, x: Tensor, y: Tensor) -> Tensor:
        """The layer's output, from all heads' values y and the layer's input x."""
        projected: Tensor = self.output_projection(y)
        return projected

    def why_not_exportable(self) -> str:
        return f"{type(self).__name__} keeps the last steps themselves, and their number grows up to its window"

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Attend from the last L of K steps: (B, L, H, d_head). Long calls go window by window, in memory as L."""
        n_queries, n_keys = queries.shape[1], keys.shape[1]
        positions = torch.arange(n_keys, device=keys.device)
        angles = phases(positions, self.n_rotated, self.rotation_base)[:, None]  # the same for all heads
        queries = self._rotate(queries, angles[n_keys - n_queries :])
        queries = queries if self.query_scale == 1 else self.query_scale * queries
        rotated = self._rotate(keys, angles)
        queries, rotated, values = (part.to(dtype).transpose(1, 2) for part in (queries, rotated, values))
        shared_by = self.n_heads // self.n_kv_heads
        if shared_by > 1:
            rotated, values = (part.repeat_interleave(shared_by, 1) for part in (rotated, values))
        dropout = self.dropout if self.training else 0.0
        return windowed_attention(queries, rotated, values, self.window, dropout).transpose(1, 2)

    def _rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        if self.n_rotated == self.d_head:
            return rotate(x, angles)
        return torch.cat([rotate(x[..., : self.n_rotated], angles), x[..., self.n_rotated :]], -1)
