"""Relative attention with a memory of hidden states (Transformer-XL, arXiv 1901.02860, section 3)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require, require_probability
from recurra.layers.attention import AttentionWindow, dot_product_attention, head_size
from recurra.layers.positions import sinusoids
from recurra.mixers.base import Dim, Mixer, StateSpec, register_mixer


class RelativeAttentionState(NamedTuple):
    """What a stream leaves for its next step; never more than mem_len + (mem_len + segment_length) * 2 vectors.

    memory: the last steps, at most mem_len, as they entered the layer; no gradient flows into them.
    context: keys and values of the memory as it was when the open segment began.
    segment: keys and values of the open segment; its length is the position in the segment.

    At the border between two segments context and segment are empty: the keys and values of the memory are made by
    the segment that sees them, with its weights and for its gradients, as the published code does.
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
        require(d_model >= 2 and d_model % 2 == 0, "d_model", d_model, even)
        require_probability(dropout=dropout)
        d_head = head_size(d_model, n_heads, d_head)
        window = AttentionWindow(segment_length, mem_len, same_length, clamp_len)
        channels = n_heads * d_head
        super().__init__(d_model, RelativeAttentionState, **_specs(d_model, channels, window))
        self.n_heads, self.d_head, self.window, self.dropout = n_heads, d_head, window, dropout
        self.queries = nn.Linear(d_model, channels, bias=False)
        self.keys_values = nn.Linear(d_model, 2 * channels, bias=False)
        self.position_keys = nn.Linear(d_model, channels, bias=False)
        self.content_bias = nn.Parameter(torch.randn(n_heads, self.d_head) * 0.02)
        self.position_bias = nn.Parameter(torch.randn(n_heads, self.d_head) * 0.02)
        self.output_projection = nn.Linear(channels, d_model, bias=False)

    def mix(
        self, x: Tensor, state: RelativeAttentionState, mask: None, *, encoding: Tensor | None = None
    ) -> tuple[Tensor, RelativeAttentionState]:
        """Attend segment by segment.

        `encoding` is `self.encode(x, state)`, where several layers of the same window share one; not for sequences of
        different lengths, which have no distances in common.
        """
        return self._by_segments(x, state, self.encode(x, state) if encoding is None else encoding)

    def _by_segments(
        self, x: Tensor, state: RelativeAttentionState, encoding: Tensor, norm: Callable[[Tensor], Tensor] = _as_it_is
    ) -> tuple[Tensor, RelativeAttentionState]:
        outputs = []
        for piece in x.split(self.window.pieces(x.shape[1], position=state.segment.shape[1]), 1):
            y, state = self._attend(piece, state, encoding, norm)
            outputs.append(y)
        return self.output_projection(torch.cat(outputs, 1)), state

    def with_window(self, window: AttentionWindow) -> None:
        """Change the lengths of the window; states of the old one do not fit the new."""
        self.window = window
        self.state_layout = type(self.state_layout)(**_specs(self.d_model, self.n_heads * self.d_head, window))

    def why_not_exportable(self) -> str:
        return "relative-attention keeps the steps of the open segment, and their number grows up to the segment's end"

    def encode(self, x: Float[Tensor, "B L d_in"], state: Any) -> Float[Tensor, "n d_model"]:
        """Encode the distances that a call with `x` and a state meets, and one more, from the largest to 0."""
        memory, position = state.memory.shape[1], state.segment.shape[1]
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


class PreNormRelativeAttention(RelativeAttention):
    """Relative attention over norm(x) and norm(memory), as the published code's `pre_lnorm` has it.

    The memory holds x itself, and the norm is applied when a segment reads it: no gradient flows into the memory, but
    the norm's weights get theirs from it. The options are those of `RelativeAttention`.
    """

    def mix(  # type: ignore[override]
        self, x: Tensor, state: RelativeAttentionState, mask: None, *, norm: nn.Module, encoding: Tensor | None = None
    ) -> tuple[Tensor, RelativeAttentionState]:
        return self._by_segments(x, state, self.encode(x, state) if encoding is None else encoding, norm)


def _specs(d_model: int, channels: int, window: AttentionWindow) -> dict[str, StateSpec]:
    return {
        "memory": StateSpec((Dim("m", window.mem_len), d_model)),
        "context": StateSpec((Dim("c", window.mem_len), 2 * channels)),
        "segment": StateSpec((Dim("p", window.segment_length - 1), 2 * channels)),
    }
