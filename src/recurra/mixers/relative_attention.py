"""Relative attention with a memory of hidden states (Transformer-XL, arXiv 1901.02860, section 3)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require, require_probability
from recurra.layers.attention import AttentionWindow, dot_product_attention, head_size
from recurra.layers.feed_forward import LinearWeights
from recurra.layers.positions import sinusoids
from recurra.mixers.base import Dim, Mixer, StateSpec, register_mixer
from recurra.ops._operator import OneNode, is_any_length


class RelativeAttentionState(NamedTuple):
    """The memory and the open segment; never more than mem_len + (mem_len + segment_length) * 2 vectors.

    memory: inputs of the last steps, at most mem_len; no gradient flows into them.
    context: keys and values of the memory at the beginning of the open segment.
    segment: keys and values of the open segment; its length is the position in the segment.

    At the border between two segments, context and segment are empty: the next segment computes the keys and values of
    the memory, with its weights and for its gradients, as in the published code.
    """

    memory: Float[Tensor, "B m d_model"]
    context: Float[Tensor, "B c 2*H*d_head"]
    segment: Float[Tensor, "B p 2*H*d_head"]


def _as_it_is(x: Tensor) -> Tensor:
    return x


@register_mixer("relative-attention")
class RelativeAttention(Mixer):
    """y_i = W_o sum_j softmax_j(A_ij / sqrt(d_head)) v_j, A_ij = (q_i + u)^T k_j + (q_i + v)^T W_R R_{i-j}.

    j runs over the memory and the open segment up to i (see `AttentionWindow`). u and v are `content_bias` and
    `position_bias`, W_R is `position_keys`, R are sinusoids.

    Args:
        d_model: channels of x and y, an even number.
        n_heads: heads.
        d_head: channels of a head; d_model / n_heads if None.
        segment_length: steps of a segment.
        mem_len: steps of the memory; 0 restarts at every segment border.
        same_length: every step sees the same number of steps.
        clamp_len: larger distances are encoded as this one; None for no limit.
        dropout: probability of dropping an attention weight.
    """

    masks_products = True

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        d_head: int | None = None,
        segment_length: int = 64,
        mem_len: int = 64,
        same_length: bool = False,
        clamp_len: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        even = "an even number from 2: half of the channels are sines"
        require(d_model % 2 == 0, "d_model", d_model, even)
        require_probability(dropout=dropout)
        d_head = head_size(d_model, n_heads, d_head)
        window = AttentionWindow(segment_length, mem_len, same_length, clamp_len)
        channels = n_heads * d_head
        super().__init__(
            d_model,
            RelativeAttentionState,
            memory=StateSpec((Dim("m", mem_len), d_model)),
            context=StateSpec((Dim("c", mem_len), 2 * channels)),
            segment=StateSpec((Dim("p", segment_length - 1), 2 * channels)),
        )
        self.n_heads, self.d_head, self.window, self.dropout = n_heads, d_head, window, dropout
        self.queries = nn.Linear(d_model, channels, bias=False)
        self.keys_values = nn.Linear(d_model, 2 * channels, bias=False)
        self.position_keys = LinearWeights(d_model, channels, bias=False)
        self.content_bias = nn.Parameter(torch.randn(n_heads, self.d_head) * 0.02)
        self.position_bias = nn.Parameter(torch.randn(n_heads, self.d_head) * 0.02)
        self.output_projection = nn.Linear(channels, d_model, bias=False)

    def mix(
        self, x: Tensor, state: RelativeAttentionState, mask: None, *, encoding: Tensor | None = None
    ) -> tuple[Tensor, RelativeAttentionState]:
        """Attend segment by segment.

        `encoding` is `self.encode(x, state)`, which layers with the same window can share; not for sequences of
        different lengths, which have no distances in common.
        """
        return self._by_segments(x, state, self.encode(x, state) if encoding is None else encoding)

    def _by_segments(
        self, x: Tensor, state: RelativeAttentionState, encoding: Tensor, norm: Callable[[Tensor], Tensor] = _as_it_is
    ) -> tuple[Tensor, RelativeAttentionState]:
        n_known = state.memory.shape[1] + state.segment.shape[1] + x.shape[1]
        if is_any_length(n_known) and not (self.dropout and self.training):
            return self._by_any_segments(x, state, encoding, norm)
        outputs = []
        for piece in x.split(self.window.pieces(x.shape[1], position=state.segment.shape[1]), 1):
            y, state = self._attend(piece, state, encoding, norm)
            outputs.append(y)
        return self.output_projection(torch.cat(outputs, 1)), state

    def _by_any_segments(
        self, x: Tensor, state: RelativeAttentionState, encoding: Tensor, norm: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, RelativeAttentionState]:
        """The same in a trace for any length, with all products before the loop over segments."""
        raw, own = torch.cat([state.memory.to(x.dtype), x], 1).detach(), norm(x)
        new, of_memory = self.keys_values(own), self.keys_values(norm(raw))
        positions = functional.linear(encoding, self.position_keys.weight)
        past = state.context.to(new.dtype), state.segment.to(new.dtype)
        biases = self.content_bias.to(new.dtype), self.position_bias.to(new.dtype)
        window = self.window.segment_length, self.window.mem_len, self.window.same_length
        y, context, segment = _any_segments(self.queries(own), new, of_memory, *past, positions, *biases, *window)
        memory = raw[:, torch.sym_max(raw.shape[1] - self.window.mem_len, 0) :].to(state.memory.dtype, copy=True)
        layers = memory, context.to(memory.dtype), segment.to(memory.dtype)
        return self.output_projection(y), RelativeAttentionState(*layers)

    def why_not_exportable(self) -> str:
        return "relative-attention keeps the steps of the open segment, and their number grows up to the segment's end"

    def encode(self, x: Float[Tensor, "B L d_in"], state: Any) -> Float[Tensor, "n d_model"]:
        """Encode the distances that a call with `x` and a state meets, and one more, from the largest to 0."""
        memory, position = state.memory.shape[1], state.segment.shape[1]
        if is_any_length(memory + position + x.shape[1]):
            memory, position = self.window.mem_len, self.window.segment_length
        n_keys = min(self.window.mem_len, memory + x.shape[1]) + min(self.window.segment_length, position + x.shape[1])
        return sinusoids(n_keys + 1, self.d_model, like=x, clamp_len=self.window.clamp_len)

    def _attend(
        self, x: Tensor, state: RelativeAttentionState, encoding: Tensor, norm: Callable[[Tensor], Tensor] = _as_it_is
    ) -> tuple[Tensor, RelativeAttentionState]:
        """Attend from steps that lie in one segment: (B, L, H * d_head), before the output projection."""
        own, keys_values = self._keys_values(x, state, norm)
        queries = self._heads(self.queries(own))
        keys, values = (self._heads(part) for part in keys_values.chunk(2, -1))
        n_queries, n_keys, scale = queries.shape[2], keys.shape[2], self.d_head**-0.5
        scores = self._position_scores(
            (queries + self.position_bias[:, None]) * scale, encoding[len(encoding) - n_keys - 1 :]
        )
        y = dot_product_attention(
            queries + self.content_bias[:, None],
            keys,
            values,
            attn_mask=scores.masked_fill(self.window.masked(n_queries, n_keys, x.device), -torch.inf),
            dropout_p=self.dropout if self.training else 0.0,
            scale=scale,
        )
        return y.transpose(1, 2).flatten(2), self._next(x, state, keys_values)

    def _keys_values(
        self, x: Tensor, state: RelativeAttentionState, norm: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """norm(x), and keys and values of the memory, the open segment and x, in this order."""
        if not state.segment.shape[1]:
            seen = norm(torch.cat([state.memory.to(x.dtype), x], 1))
            return seen[:, seen.shape[1] - x.shape[1] :], self.keys_values(seen)
        own = norm(x)
        new = self.keys_values(own)
        return own, torch.cat([state.context.to(new.dtype), state.segment.to(new.dtype), new], 1)

    def _position_scores(self, queries: Tensor, encoding: Tensor) -> Tensor:
        """(q_i + v)^T W_R R_{i-j} for queries (B, H, L, d_head) and all K keys: (B, H, L, K)."""
        weight = self.position_keys.weight.unflatten(0, (self.n_heads, self.d_head))
        n_queries, n_rows = queries.shape[2], len(encoding)
        n_in_all = queries.shape[0] * n_queries
        # Both orders of the product give the same; for few queries it is not worth while to make all position keys.
        if n_in_all * self.d_model * (self.d_head + n_rows) < n_rows * self.d_head * (self.d_model + n_in_all):
            scores = (queries @ weight) @ encoding.T
        else:
            scores = queries @ (weight @ encoding.T)
        return scores.flatten(-2)[..., n_queries:].unflatten(-1, (n_queries, n_rows - 1))

    def _next(self, x: Tensor, state: RelativeAttentionState, keys_values: Tensor) -> RelativeAttentionState:
        """The state after x, which is at most the rest of the open segment."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        newest = x.detach()[:, max(0, x.shape[1] - self.window.mem_len) :].to(dtype)
        kept = min(state.memory.shape[1], self.window.mem_len - newest.shape[1])
        memory = torch.cat([state.memory.detach()[:, state.memory.shape[1] - kept :], newest], 1)
        position = state.segment.shape[1] + x.shape[1]
        if position == self.window.segment_length:
            empty = memory.new_zeros((x.shape[0], 0, keys_values.shape[2]))
            return RelativeAttentionState(memory, empty, empty)
        keys_values = keys_values.to(dtype)
        n_context = keys_values.shape[1] - position
        return RelativeAttentionState(memory, keys_values[:, :n_context], keys_values[:, n_context:])

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, self.d_head)).transpose(1, 2)


def _segments(
    queries: Tensor, new: Tensor, of_memory: Tensor, context: Tensor, segment: Tensor, positions: Tensor,
    content_bias: Tensor, position_bias: Tensor, segment_length: int, mem_len: int, same_length: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attend segment by segment: y before the output projection, and the next context and segment.

    `new` are keys and values of all steps, `of_memory` those of the memory and all steps as later segments see them.
    """
    window, empty, outputs, start = AttentionWindow(segment_length, mem_len, same_length), new[:, :0], [], 0
    n_heads, d_head = content_bias.shape
    heads = lambda part: part.unflatten(-1, (n_heads, d_head)).transpose(-3, -2)  # noqa: E731
    for n_queries in window.pieces(new.shape[1], segment.shape[1]):
        before = of_memory.shape[1] - new.shape[1] + start
        if not segment.shape[1]:
            context = of_memory[:, max(0, before - mem_len) : before]
        segment = torch.cat([segment, new[:, start : start + n_queries]], 1)
        keys, values = map(heads, torch.cat([context, segment], 1).chunk(2, -1))
        q, n_keys = heads(queries[:, start : start + n_queries]), keys.shape[2]
        rows = heads(positions[len(positions) - n_keys - 1 :]).transpose(-1, -2)
        scores = (((q + position_bias[:, None]) * d_head**-0.5) @ rows).flatten(-2)[..., n_queries:]
        scores = scores.unflatten(-1, (n_queries, n_keys))
        mask = scores.masked_fill(window.masked(n_queries, n_keys, q.device), -torch.inf)
        y = dot_product_attention(q + content_bias[:, None], keys, values, attn_mask=mask, scale=d_head**-0.5)
        outputs.append(y.transpose(1, 2).flatten(2))
        start += n_queries
        if segment.shape[1] == segment_length:
            context, segment = empty, empty
    return torch.cat(outputs, 1), context, segment


def _segments_result(queries: Tensor, new: Tensor, of_memory: Tensor, context: Tensor, segment: Tensor, *rest: Any):  # type: ignore[no-untyped-def]
    """Sizes by arithmetic alone: a trace cannot ask whether a segment ends."""
    segment_length, mem_len = rest[3:5]
    batch, n_new, channels = new.shape
    position = (segment.shape[1] + n_new) % segment_length
    is_open = torch.sym_min(position, 1)
    n_context = torch.sym_min(mem_len, of_memory.shape[1] - position)
    if segment.shape[1]:
        is_later = torch.sym_min((segment.shape[1] + n_new) // segment_length, 1)
        n_context = is_later * n_context + (1 - is_later) * context.shape[1]
    kept = (new.new_empty((batch, n, channels)) for n in (is_open * n_context, position))
    return queries.new_empty(queries.shape), *kept


_any_segments = OneNode(
    "relative_attention(Tensor queries, Tensor new, Tensor of_memory, Tensor context, Tensor segment, "
    "Tensor positions, Tensor content_bias, Tensor position_bias, int segment_length, int mem_len, bool same_length) "
    "-> (Tensor, Tensor, Tensor)",
    _segments,
    _segments_result,
    n_inputs=8,
)


class PreNormRelativeAttention(RelativeAttention):
    """Relative attention over norm(x) and norm(memory), as the published code's `pre_lnorm` has it.

    The memory holds x itself, and the norm is applied when a segment reads it: no gradient flows into the memory, but
    the norm's weights get theirs from it. The options are those of `RelativeAttention`.
    """

    def mix(  # type: ignore[override]
        self, x: Tensor, state: RelativeAttentionState, mask: None, *, norm: nn.Module, encoding: Tensor | None = None
    ) -> tuple[Tensor, RelativeAttentionState]:
        return self._by_segments(x, state, self.encode(x, state) if encoding is None else encoding, norm)
