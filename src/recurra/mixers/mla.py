"""Multi-head latent attention: the keys and values of all heads from one small vector per step (DeepSeek-AI 2024,
"DeepSeek-V2", arXiv 2405.04434, section 2.1; without positions in Kimi Linear, arXiv 2510.26692).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require, require_at_least, require_positive, require_probability
from recurra.layers.attention import (
    append_to_cache,
    cache_limit,
    head_size,
    trim_cache,
    visible_steps,
    windowed_attention,
)
from recurra.layers.feed_forward import LinearWeights
from recurra.layers.norms import RMSNorm, at_least_float32
from recurra.layers.positions import phases, rotate
from recurra.mixers.base import Dim, Mixer, StateSpec, register_mixer
from recurra.ops._operator import is_any_length


class MultiHeadLatentAttentionState(NamedTuple):
    """Normalised latents c and unrotated shared keys s of the last p steps; p is at most window - 1."""

    latents: Float[Tensor, "B p d_latent"]
    shared_keys: Float[Tensor, "B p d_shared"]


@register_mixer("mla")
class MultiHeadLatentAttention(Mixer):
    """y_n = W_o sum_m softmax_m((q_n . W_k c_m + p_n . R_(m-n) s_m) / sqrt(d_head + d_shared)) W_v c_m for each head.

    c_m = norm(W_c x_m) has `d_latent` channels for all heads, and all heads share the key s_m = W_s x_m. The state
    holds both for the last steps. (q_n, p_n) = W_q x_n is a head's query. R_t rotates pairs of channels by t theta_i,
    and m runs over the last `window` steps up to n. A call multiplies W_k by the queries or by the latents,
    depending on which costs less.

    Args:
        n_heads: heads.
        d_head: channels of a head's keys that are computed from the latent; d_model / n_heads if None.
        d_value: channels of a head's values; `d_head` if None.
        d_latent: channels of c; 4 d_head, as published, if None.
        d_shared: channels of s, an even number if they are rotated; about d_head / 2, as published, if None.
        d_query_latent: channels of a normalised latent from which queries are computed; None computes them from x.
        rotation_base: base of the angles theta_i = base^(-2i / d_shared); None for no positions, as in Kimi Linear.
        window: number of steps that a step attends to, itself included. None keeps all steps: the state and the time
            per step then grow with every step.
        dropout: probability of dropping an attention weight.
        norm_epsilon: added to the mean square in the norms.
    """

    masks_products = True

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        d_head: int | None = None,
        d_value: int | None = None,
        d_latent: int | None = None,
        d_shared: int | None = None,
        d_query_latent: int | None = None,
        rotation_base: float | None = 10000.0,
        window: int | None = 128,
        dropout: float = 0.0,
        norm_epsilon: float = 1e-6,
    ) -> None:
        d_head = head_size(d_model, n_heads, d_head)
        d_value, d_latent = d_head if d_value is None else d_value, 4 * d_head if d_latent is None else d_latent
        d_shared = max(2, d_head // 4 * 2) if d_shared is None else d_shared
        require_at_least(1, d_value=d_value, d_latent=d_latent, d_shared=d_shared)
        require_at_least(1, d_query_latent=1 if d_query_latent is None else d_query_latent)
        is_even = d_shared % 2 == 0 or rotation_base is None
        require(is_even, "d_shared", d_shared, "an even number: channels rotate in pairs", "or set rotation_base: null")
        require_positive(norm_epsilon=norm_epsilon, rotation_base=1.0 if rotation_base is None else rotation_base)
        require_probability(dropout=dropout)
        past = Dim("p", cache_limit(window))
        layout = {"latents": StateSpec((past, d_latent)), "shared_keys": StateSpec((past, d_shared))}
        super().__init__(d_model, MultiHeadLatentAttentionState, **layout)
        self.n_heads, self.d_head, self.d_value = n_heads, d_head, d_value
        self.d_latent, self.d_shared, self.d_query_latent = d_latent, d_shared, d_query_latent
        self.rotation_base, self.window, self.dropout = rotation_base, window, dropout
        n_queries = n_heads * (d_head + d_shared)
        has_latent, d_queries = d_query_latent is not None, d_query_latent or d_model
        self.query_compression = nn.Linear(d_model, d_queries, bias=False) if has_latent else nn.Identity()
        self.query_norm = RMSNorm(d_queries, norm_epsilon) if has_latent else nn.Identity()
        self.queries = nn.Linear(d_queries, n_queries, bias=False)
        self.compression = nn.Linear(d_model, d_latent + d_shared, bias=False)
        self.norm = RMSNorm(d_latent, norm_epsilon)
        self.expansion = LinearWeights(d_latent, n_heads * (d_head + d_value), bias=False)
        self.output_projection = nn.Linear(n_heads * d_value, d_model, bias=False)

    def mix(
        self, x: Tensor, state: MultiHeadLatentAttentionState, mask: None
    ) -> tuple[Tensor, MultiHeadLatentAttentionState]:
        latents, shared_keys = self.compression(x).split([self.d_latent, self.d_shared], -1)
        new = MultiHeadLatentAttentionState(at_least_float32(self.norm(latents)), at_least_float32(shared_keys))
        queries = self.queries(self.query_norm(self.query_compression(x)).to(x.dtype))
        y, state = self.attend(queries.unflatten(-1, (self.n_heads, -1)), new, state)
        return self.output_projection(y.flatten(2)), state

    def why_not_exportable(self) -> str:
        return f"{type(self).__name__} keeps the last steps themselves, and their number grows up to its window"

    def attend(
        self,
        queries: Float[Tensor, "B L H d_query"],
        new: MultiHeadLatentAttentionState,
        state: MultiHeadLatentAttentionState,
    ) -> tuple[Float[Tensor, "B L H d_value"], MultiHeadLatentAttentionState]:
        """Attend to the steps of the state and the new ones; return the state after them."""
        known = append_to_cache(state, new)
        return self._attend(queries, *known), trim_cache(known, self.window)

    def _attend(
        self,
        queries: Float[Tensor, "B L H d_query"],
        latents: Float[Tensor, "B K d_latent"],
        shared_keys: Float[Tensor, "B K d_shared"],
    ) -> Float[Tensor, "B L H d_value"]:
        """Attend from the last L steps to all K steps, within the window."""
        n_queries, n_keys, dtype = queries.shape[1], latents.shape[1], queries.dtype
        queries, positioned = queries.split([self.d_head, self.d_shared], -1)
        if self.rotation_base is not None:
            positions = torch.arange(n_keys, device=latents.device)
            angles = phases(positions, self.d_shared, self.rotation_base)
            shared_keys = rotate(shared_keys, angles)
            positioned = rotate(at_least_float32(positioned), angles[n_keys - n_queries :, None])
        latents, shared_keys, positioned = (x.to(dtype) for x in (latents, shared_keys, positioned))
        attend = self._by_latents if self._has_few_queries(n_queries, n_keys) else self._by_keys
        return attend(queries, positioned, latents, shared_keys)

    def _has_few_queries(self, n_queries: int, n_keys: int) -> bool:
        """Whether multiplying queries by latents costs less than computing the keys and values of all steps."""
        if is_any_length(n_keys):
            return False
        per_step = self.d_latent * (self.d_head + self.d_value)
        by_latents = n_queries * (per_step + n_keys * (2 * self.d_latent + self.d_shared))
        return by_latents < n_keys * (per_step + n_queries * (self.d_head + self.d_shared + self.d_value))

    def _by_keys(self, queries: Tensor, positioned: Tensor, latents: Tensor, shared_keys: Tensor) -> Tensor:
        expanded = functional.linear(latents, self.expansion.weight).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        keys, values = expanded.split([self.d_head, self.d_value], -1)
        keys = torch.cat([keys, shared_keys[:, None].expand(-1, self.n_heads, -1, -1)], -1)
        queries = torch.cat([queries, positioned], -1).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        return windowed_attention(queries, keys, values, self.window, dropout).transpose(1, 2)

    def _by_latents(self, queries: Tensor, positioned: Tensor, latents: Tensor, shared_keys: Tensor) -> Tensor:
        """Attend to the latents themselves: the queries of all heads are rows of one matrix product."""
        queries = torch.cat([self.absorbed(queries), positioned], -1).flatten(1, 2)
        scores = queries @ torch.cat([latents, shared_keys], -1).transpose(1, 2)
        scores = at_least_float32(scores.unflatten(1, (-1, self.n_heads))) * (self.d_head + self.d_shared) ** -0.5
        visible = visible_steps(scores.shape[1], latents.shape[1], self.window, latents.device)
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1).to(latents.dtype)
        weights = functional.dropout(weights, self.dropout, self.training)
        y = (weights.flatten(1, 2) @ latents).unflatten(1, (-1, self.n_heads))
        return self.values_of(y)

    def expansions(self) -> tuple[Float[Tensor, "H d_head d_latent"], Float[Tensor, "H d_value d_latent"]]:
        """Return W_k and W_v of each head."""
        of_keys, of_values = self.expansion.weight.unflatten(0, (self.n_heads, -1)).split(
            [self.d_head, self.d_value], 1
        )
        return of_keys, of_values

    def absorbed(self, queries: Float[Tensor, "B L H d_head"]) -> Float[Tensor, "B L H d_latent"]:
        """Multiply queries by W_k, so that their products with latents equal those with keys."""
        return torch.einsum("blhd,hdc->blhc", queries, self.expansions()[0])

    def values_of(self, latents: Float[Tensor, "B L H d_latent"]) -> Float[Tensor, "B L H d_value"]:
        """Multiply each head's weighted sum of latents by W_v."""
        return torch.einsum("blhc,hdc->blhd", latents, self.expansions()[1])
