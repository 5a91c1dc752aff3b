"""The recurrent layer of a Block-Recurrent Transformer: attention between a block of tokens and state vectors (Hutchins
et al. 2022, arXiv 2203.07852, section 3).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import choose, require, require_at_least
from recurra.layers.attention import dot_product_attention
from recurra.layers.norms import at_least_float32
from recurra.mixers.base import StateSpec, with_zero_gradients
from recurra.mixers.relative_attention import RelativeAttention, RelativeAttentionState
from recurra.models._adaptive_shell import EncodedShell, TransformerConfig, make_dropout
from recurra.models.registry import register_model


class _FixedGate(nn.Module):
    """c' = g c + (1 - g) z with z = W_z h + b_z and g = sigmoid(b_g), the same at every step; b_g starts at 1."""

    def __init__(self, n_channels: int, d_model: int) -> None:
        super().__init__()
        self.candidate = nn.Linear(n_channels, d_model)
        self.bias = nn.Parameter(torch.ones(d_model))

    def forward(self, c: Float[Tensor, "B S D"], h: Float[Tensor, "B S n"]) -> Float[Tensor, "B S D"]:
        g = torch.sigmoid(self.bias.to(c.dtype))
        return g * c + (1 - g) * self.candidate(h).to(c.dtype)


class _LSTMGate(nn.Module):
    """c' = f c + i z with z = tanh(W_z h + b_z), i = sigmoid(W_i h + b_i - 1), f = sigmoid(W_f h + b_f + 1)."""

    def __init__(self, n_channels: int, d_model: int) -> None:
        super().__init__()
        self.candidate_and_gates = nn.Linear(n_channels, 3 * d_model)

    def forward(self, c: Float[Tensor, "B S D"], h: Float[Tensor, "B S n"]) -> Float[Tensor, "B S D"]:
        z, i, f = self.candidate_and_gates(h).to(c.dtype).chunk(3, -1)
        return torch.sigmoid(f + 1) * c + torch.sigmoid(i - 1) * torch.tanh(z)


_GATES: dict[str, type[_FixedGate] | type[_LSTMGate]] = {"fixed": _FixedGate, "lstm": _LSTMGate}


class _BlockRecurrentAttentionState(NamedTuple):
    """What a stream leaves for its next step."""

    memory: Float[Tensor, "B m d_model"]
    context: Float[Tensor, "B c 2*H*d_head"]
    segment: Float[Tensor, "B p 2*H*d_head"]
    vectors: Float[Tensor, "B S d_model"]


class _BlockRecurrentAttention(RelativeAttention):
    """Tokens attend to tokens and to state vectors; once a block, the vectors attend to vectors and to its tokens."""

    def __init__(
        self,
        d_model: int,
        *,
        n_states: int,
        gate: str,
        segment_length: int,
        n_heads: int,
        d_head: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        require_at_least(1, n_states=n_states)
        super().__init__(
            d_model,
            n_heads=n_heads,
            d_head=d_head,
            segment_length=segment_length,
            mem_len=segment_length,
            same_length=True,
            dropout=dropout,
        )
        layout = {**self.state_layout._asdict(), "vectors": StateSpec((n_states, d_model))}
        self.state_layout = _BlockRecurrentAttentionState(**layout)
        channels = self.n_heads * self.d_head
        self.output_projection = nn.Linear(2 * channels, d_model, bias=False)
        self.vector_queries = nn.Linear(d_model, channels, bias=False)  # of tokens that look at vectors
        self.norm_vectors = nn.LayerNorm(d_model)
        self.vector_ids = nn.Parameter(torch.randn(n_states, d_model))
        self.of_vectors = nn.Linear(d_model, 4 * channels, bias=False)  # queries to vectors, to tokens, keys, values
        self.gate = _GATES[gate](2 * channels, d_model)

    def mix(  # type: ignore[override]
        self, x: Tensor, state: _BlockRecurrentAttentionState, mask: None, *, encoding: Tensor | None = None
    ) -> tuple[Tensor, _BlockRecurrentAttentionState]:
        tokens, vectors = RelativeAttentionState(*state[:3]), state.vectors
        if encoding is None:
            encoding = self.encode(x, tokens)
        outputs = []
        for piece in x.split(self.window.pieces(x.shape[1], position=tokens.segment.shape[1]), 1):
            of_block = tokens.segment
            seen, tokens = self._attend(piece, tokens, encoding)
            entering = self.norm_vectors(vectors.to(piece.dtype)) + self.vector_ids.to(piece.dtype)
            to_vectors, to_tokens, keys, values = map(self._heads, self.of_vectors(entering).chunk(4, -1))
            read = self._read(self._heads(self.vector_queries(piece)), keys, values)
            outputs.append(self.output_projection(torch.cat([seen, read], -1)))
            if not tokens.segment.shape[1]:  # the block is whole
                new = self.keys_values(piece)
                block = map(self._heads, torch.cat([of_block.to(new.dtype), new], 1).chunk(2, -1))
                h = torch.cat([self._read(to_vectors, keys, values), self._read(to_tokens, *block)], -1)
                vectors = self.gate(at_least_float32(vectors), h)
        # The vectors after the last block are of the state alone.
        y = with_zero_gradients(torch.cat(outputs, 1), self.gate.parameters() if len(outputs) == 1 else ())
        return y, _BlockRecurrentAttentionState(*tokens, vectors)

    def _read(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return dot_product_attention(queries, keys, values, dropout_p=dropout).transpose(1, 2).flatten(2)


@dataclass(frozen=True, kw_only=True)
class BlockRecurrentTransformerConfig(TransformerConfig):
    """A Block-Recurrent Transformer; the segment is its block, and what a token sees."""

    n_states: int = 512
    """State vectors of the recurrent layer."""
    gate: str = "fixed"
    """How the state changes after a block: "fixed", or "lstm"."""
    recurrent_layer: int | None = None
    """The recurrent layer, counted from 1; if None, layer 10 of 12, as published, in proportion."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, n_states=self.n_states)
        choose("gate", _GATES, self.gate)
        exists = 1 <= self.number_of_recurrent_layer <= self.n_layer
        require(exists, "recurrent_layer", self.recurrent_layer, f"one of the {self.n_layer} layers, from 1")

    @property
    def number_of_recurrent_layer(self) -> int:
        """Which layer is recurrent, the first being 1."""
        return max(1, round(self.n_layer * 10 / 12)) if self.recurrent_layer is None else self.recurrent_layer


class BlockRecurrentTransformerState(NamedTuple):
    """One state per layer, in the layers' order; the recurrent layer's has the state vectors too."""

    layers: tuple[RelativeAttentionState | _BlockRecurrentAttentionState, ...]


@register_model("block-recurrent-transformer", config=BlockRecurrentTransformerConfig)
class BlockRecurrentTransformer(EncodedShell):
    """Transformer-XL with a sliding window, one of whose layers reads and writes state vectors once a block.

    Every token sees the last segment_length tokens, in every layer, with relative positions (the paper has T5's biases
    instead of Transformer-XL's). No gradient flows into tokens before the open block. Gradients flow through the
    state vectors until the caller detaches the state. `d_model` must be even.
    """

    state_class = BlockRecurrentTransformerState

    def __init__(self, config: BlockRecurrentTransformerConfig) -> None:
        super().__init__(config)
        self.encoding_dropout = make_dropout(config)
        self._make_stack(map(self._make_attention, range(1, config.n_layer + 1)))

    def _make_attention(self, number: int) -> RelativeAttention:
        config = self.config
        shared = {
            "n_heads": config.n_heads,
            "d_head": config.d_head,
            "segment_length": config.segment_length,
            "dropout": config.attention_dropout,
        }
        if number == config.number_of_recurrent_layer:
            return _BlockRecurrentAttention(config.d_model, n_states=config.n_states, gate=config.gate, **shared)
        return RelativeAttention(config.d_model, mem_len=config.segment_length, same_length=True, **shared)
