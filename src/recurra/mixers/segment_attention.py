"""Causal attention that restarts at every segment border, without positions (CRT section 3)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require_probability
from recurra.layers.attention import AttentionWindow, causal_attention, head_size
from recurra.mixers.base import Dim, Mixer, StateSpec


class _SegmentAttentionState(NamedTuple):
    """Keys and values of the open segment, never more than one segment less one step; empty at a border."""

    segment: Float[Tensor, "B p 2*H*d_head"]


class SegmentAttention(Mixer):
    """y_i = W_o sum_{j<=i} softmax_j((x_i W_q)(x_j W_k)^T / sqrt(d_head)) x_j W_v, j in the segment of i (CRT (1)).

    The scores do not depend on positions: a recurrent network encodes the order of the tokens (CRT section 3).

    Args:
        n_heads: heads.
        d_head: channels of a head; d_model / n_heads if None.
        segment_length: steps of a segment.
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
        dropout: float = 0.0,
    ) -> None:
        require_probability(dropout=dropout)
        d_head = head_size(d_model, n_heads, d_head)
        window = AttentionWindow(segment_length, mem_len=0)
        channels = n_heads * d_head
        super().__init__(
            d_model, _SegmentAttentionState, segment=StateSpec((Dim("p", segment_length - 1), 2 * channels))
        )
        self.n_heads, self.d_head, self.window, self.dropout = n_heads, d_head, window, dropout
        self.queries = nn.Linear(d_model, channels, bias=False)
        self.keys_values = nn.Linear(d_model, 2 * channels, bias=False)
        self.output_projection = nn.Linear(channels, d_model, bias=False)

    def mix(self, x: Tensor, state: _SegmentAttentionState, mask: None) -> tuple[Tensor, _SegmentAttentionState]:
        outputs = []
        for piece in x.split(self.window.pieces(x.shape[1], state.segment.shape[1]), 1):
            y, state = self._attend(piece, state)
            outputs.append(y)
        return self.output_projection(torch.cat(outputs, 1)), state

    def _attend(self, x: Tensor, state: _SegmentAttentionState) -> tuple[Tensor, _SegmentAttentionState]:
        """Attend from steps that lie in one segment: (B, L, H * d_head), before the output projection."""
        new = self.keys_values(x)
        keys_values = torch.cat([state.segment.to(new.dtype), new], 1)
        keys, values = (self._heads(part) for part in keys_values.chunk(2, -1))
        queries = self._heads(self.queries(x))
        visible = ~self.window.masked(x.shape[1], keys.shape[2], x.device)
        dropout = self.dropout if self.training else 0.0
        y = causal_attention(queries, keys, values, visible=visible, dropout_p=dropout)
        kept = keys_values.to(state.segment.dtype)
        if keys.shape[2] == self.window.segment_length:
            kept = kept.new_zeros((len(x), 0, kept.shape[2]))
        return y.transpose(1, 2).flatten(2), _SegmentAttentionState(kept)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, self.d_head)).transpose(1, 2)
