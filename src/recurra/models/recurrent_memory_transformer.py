"""The Recurrent Memory Transformer (Bulatov et al., arXiv 2207.06881): a Transformer reads and writes memory tokens."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require_at_least, require_layout
from recurra.layers.attention import AttentionWindow
from recurra.mixers.base import with_zero_gradients
from recurra.mixers.relative_attention import RelativeAttention
from recurra.models._adaptive_shell import AdaptiveShell, TransformerConfig, require_position
from recurra.models.registry import register_model


@dataclass(frozen=True, kw_only=True)
class RecurrentMemoryTransformerConfig(TransformerConfig):
    """A Recurrent Memory Transformer; the segment does not count the memory."""

    n_memory: int = 10
    """Memory tokens that a segment reads, and writes for the next one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, n_memory=self.n_memory)


class RecurrentMemoryTransformerState(NamedTuple):
    """What a stream leaves for its next step; never more than one segment and the memory.

    position: tokens of the open segment so far.
    memory: the memory tokens that the open segment reads.
    layers: the attention's keys and values of the open segment, one state per block.
    """

    position: int
    memory: Float[Tensor, "B n_memory d_model"]
    layers: tuple[Any, ...]


@register_model("rmt", config=RecurrentMemoryTransformerConfig)
class RecurrentMemoryTransformer(AdaptiveShell):
    """Segments of n tokens between memory tokens: [read; x_1..x_n; write] (section 3.2).

    The memory enters in front of a segment and once more behind it; all steps attend causally over the segment with
    relative positions, so the tokens read the memory, and the tokens behind them gather what to write. Their outputs
    are the next segment's memory. A stream's first memory is learned. Gradients flow through the memory until the
    caller detaches the state. `d_model` must be even.
    """

    state_class = RecurrentMemoryTransformerState

    def __init__(self, config: RecurrentMemoryTransformerConfig) -> None:
        super().__init__(config)
        self.first_memory = nn.Parameter(torch.randn(config.n_memory, config.d_model) * 0.02)
        self._make_stack(self._make_attention() for _ in range(config.n_layer))
        self._window = AttentionWindow(config.segment_length, mem_len=0)

    def _make_attention(self) -> RelativeAttention:
        return RelativeAttention(
            self.config.d_model,
            n_heads=self.config.n_heads,
            d_head=self.config.d_head,
            segment_length=self.config.segment_length + 2 * self.config.n_memory,
            mem_len=0,
            dropout=self.config.attention_dropout,
        )

    def body(
        self, x: Float[Tensor, "B L d_model"], state: RecurrentMemoryTransformerState | None, **options: Any
    ) -> tuple[Float[Tensor, "B L d_model"], RecurrentMemoryTransformerState]:
        """Run segment by segment."""
        if state is None:
            state = self._start(x)
        else:
            state, x = self._checked_state(state, x), with_zero_gradients(x, [self.first_memory])
        outputs = []
        for piece in x.split(self._window.pieces(x.shape[1], state.position), 1):
            y, state = self._within_segment(piece, state, **options)
            outputs.append(y)
        return self.output_dropout(torch.cat(outputs, 1)), state

    def _start(self, x: Tensor) -> RecurrentMemoryTransformerState:
        memory = self.first_memory.to(torch.promote_types(x.dtype, torch.float32)).repeat(len(x), 1, 1)
        return RecurrentMemoryTransformerState(0, memory, self._layers(len(x)))

    def _checked_state(self, state: Any, x: Tensor) -> RecurrentMemoryTransformerState:
        entering: RecurrentMemoryTransformerState = super()._checked_state(state, x)
        require_position(entering.position, self.config.segment_length)
        shape, real = (len(x), *self.first_memory.shape), torch.promote_types(x.dtype, torch.float32)
        require_layout("state.memory", entering.memory, shape, real, x.device)
        return entering

    def _within_segment(
        self, x: Tensor, state: RecurrentMemoryTransformerState, **options: Any
    ) -> tuple[Tensor, RecurrentMemoryTransformerState]:
        """Run tokens of one segment: the memory in front of its first token, and once more behind its last."""
        memory, position = state.memory.to(x.dtype), state.position + x.shape[1]
        n_before = 0 if state.position else memory.shape[1]
        is_whole = position == self.config.segment_length
        y = torch.cat([*([memory] if n_before else []), x, *([memory] if is_whole else [])], 1)
        places = slice(n_before, n_before + x.shape[1])
        y, layers = self.run_blocks(y, state.layers, tokens=places, **options)
        tokens = y[:, places]
        if not is_whole:
            return tokens, RecurrentMemoryTransformerState(position, state.memory, layers)
        written = y[:, n_before + x.shape[1] :].to(state.memory.dtype).clone()
        return tokens, RecurrentMemoryTransformerState(0, written, layers)
