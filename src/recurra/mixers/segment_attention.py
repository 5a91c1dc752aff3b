"""Causal attention that restarts at every segment border, without positions (CRT section 3)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.layers.attention_window import AttentionWindow


class SegmentAttentionState(NamedTuple):
    """Keys and values of the open segment, never more than one segment less one step; empty at a border."""

    segment: Float[Tensor, "B p 2*H*d_head"]


class SegmentAttention(nn.Module):
    """y_i = W_o sum_{j<=i} softmax_j((x_i W_q)(x_j W_k)^T / sqrt(d_head)) x_j W_v, j in the segment of i.

    No position enters the scores: in CRT a recurrent network gives the tokens their order.

    Args:
        d_model: channels of x and y.
        n_heads: heads.
        d_head: channels of a head; d_model / n_heads when None.
        segment_length: steps of a segment.
        dropout: probability of dropping an attention weight.

    Raises:
        ValueError: a size is out of range, or the heads do not divide the channels.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        d_head: int | None = None,
        segment_length: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if n_heads < 1 or (d_head is None and d_model % n_heads):
            raise ValueError(f"n_heads is {n_heads}; it must divide d_model = {d_model}, or d_head must be given")
        if d_head is not None and d_head < 1:
            raise ValueError(f"d_head is {d_head}; expected at least 1")
        self.d_model, self.n_heads = d_model, n_heads
        self.d_head = d_model // n_heads if d_head is None else d_head
        self.window = AttentionWindow(segment_length, mem_len=0)
        self.dropout = dropout
        channels = n_heads * self.d_head
        self.queries = nn.Linear(d_model, channels, bias=False)
        self.keys_values = nn.Linear(d_model, 2 * channels, bias=False)
        self.output_projection = nn.Linear(channels, d_model, bias=False)

    def forward(
        self, x: Float[Tensor, "B L d_model"], state: SegmentAttentionState | None = None
    ) -> tuple[Float[Tensor, "B L d_model"], SegmentAttentionState]:
        """Mix `x` along time, going on from `state`; None is the start of a stream.

        Args:
            x: any number of steps, within a segment or over several.
            state: what the steps before left.

        Raises:
            ValueError: the state comes from a longer segment.
        """
        if state is None:
            dtype = torch.promote_types(x.dtype, torch.float32)
            state = SegmentAttentionState(x.new_zeros((x.shape[0], 0, 2 * self.n_heads * self.d_head), dtype=dtype))
        position = state.segment.shape[1]
        if position >= self.window.segment_length:
            raise ValueError(
                f"state has {position} steps of an open segment; with segment_length {self.window.segment_length} "
                "there are fewer: start the stream anew when the length changes"
            )
        if not x.shape[1]:
            return x, state
        outputs = []
        for piece in x.split(self.window.pieces(x.shape[1], position), 1):
            y, state = self._attend(piece, state)
            outputs.append(y)
        return self.output_projection(torch.cat(outputs, 1)), state

    def _attend(self, x: Tensor, state: SegmentAttentionState) -> tuple[Tensor, SegmentAttentionState]:
        """Attend from steps that lie in one segment: (B, L, H * d_head), before the output projection."""
        new = self.keys_values(x)
        keys_values = torch.cat([state.segment.to(new.dtype), new], 1)
        keys, values = (self._heads(part) for part in keys_values.chunk(2, -1))
        queries = self._heads(self.queries(x))
        visible = ~self.window.masked(x.shape[1], keys.shape[2], x.device)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, dropout_p=dropout)
        is_whole = keys.shape[2] == self.window.segment_length
        kept = keys_values[:, :0] if is_whole else keys_values
        return y.transpose(1, 2).flatten(2), SegmentAttentionState(kept.to(state.segment.dtype))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, self.d_head)).transpose(1, 2)
