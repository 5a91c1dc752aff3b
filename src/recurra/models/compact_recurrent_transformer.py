"""The Compact Recurrent Transformer (CRT): short segments, and one memory vector between them (CRT section 3)."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require, require_layout, require_literal
from recurra.layers.attention import AttentionWindow
from recurra.mixers.base import Mixer, with_zero_gradients
from recurra.mixers.relative_attention import RelativeAttention
from recurra.mixers.rnn import RNN, RNNState
from recurra.mixers.segment_attention import SegmentAttention
from recurra.models._adaptive_shell import AdaptiveShell, TransformerConfig, draw_biases, require_position
from recurra.models.registry import register_model
from recurra.ops.cells.gru import GRUCell, RecurrentWeights
from recurra.ops.cells.orthogonal import NCGRUCell

CELLS: dict[str, type[GRUCell]] = {"gru": GRUCell, "ncgru": NCGRUCell}
"""The recurrent cells by name."""


class _NoMemory(nn.Module):
    """Nothing is carried between segments: the Transformer of the paper's tables."""

    n_tokens = 0

    def start(self, x: Float[Tensor, "B L d"]) -> Float[Tensor, "B 0"]:
        return x.new_zeros((x.shape[0], 0), dtype=torch.promote_types(x.dtype, torch.float32))

    def tokens(self, memory: Float[Tensor, "B 0"], x: Float[Tensor, "B L d"]) -> Float[Tensor, "B 0 d"]:
        return x[:, :0]

    def weights(self) -> None:
        """Return what the calls of `read` share: nothing."""

    def read(self, y: Tensor, memory: Tensor, weights: RecurrentWeights | None = None) -> Tensor:
        return memory


class RNNMemory(nn.Module):
    """One vector m, a token before each segment. An RNN reads the outputs, starting at m; its last state is the next m.

    Args:
        cell: the recurrent cell, d_model to d_model.
    """

    n_tokens = 1

    def __init__(self, cell: GRUCell) -> None:
        super().__init__()
        self.rnn = RNN(cell)

    def start(self, x: Float[Tensor, "B L d"]) -> Float[Tensor, "B d"]:
        """Return the memory at the start of a stream: zeros, float32 or better."""
        return x.new_zeros((x.shape[0], x.shape[2]), dtype=torch.promote_types(x.dtype, torch.float32))

    def tokens(self, memory: Float[Tensor, "B d"], x: Float[Tensor, "B L d"]) -> Float[Tensor, "B 1 d"]:
        """Return the token before a segment, in x's dtype."""
        return memory[:, None].to(x.dtype)

    def weights(self) -> RecurrentWeights:
        """Return what the calls of `read` share."""
        return self.rnn.cell.recurrent_weights()

    def read(
        self, y: Float[Tensor, "B L d"], memory: Float[Tensor, "B d"], weights: RecurrentWeights | None = None
    ) -> Float[Tensor, "B d"]:
        """Return the memory after the outputs y, continuing from the memory before them."""
        return self.rnn(y, RNNState(memory), weights=weights)[1].h


class _RelativePosition(nn.Module):
    """The tokens as they are: relative attention knows their order."""

    def start(self, memory: Float[Tensor, "B m"]) -> Float[Tensor, "B 0"]:
        return memory[:, :0]

    def weights(self) -> None:
        """Return what calls share: nothing."""

    def forward(self, x: Tensor, state: Tensor, weights: RecurrentWeights | None = None) -> tuple[Tensor, Tensor]:
        return x, state


class _RNNPosition(nn.Module):
    """The outputs of an RNN over the segment replace the tokens: the RNN gives them their order."""

    def __init__(self, cell: GRUCell, start: str) -> None:
        super().__init__()
        self.rnn, self._from_memory = RNN(cell), start == "memory"

    def start(self, memory: Tensor) -> Tensor:
        from_memory = self._from_memory and memory.shape[1]
        return memory if from_memory else memory.new_zeros(memory.shape[0], self.rnn.cell.hidden_size)

    def weights(self) -> RecurrentWeights:
        return self.rnn.cell.recurrent_weights()

    def forward(self, x: Tensor, state: Tensor, weights: RecurrentWeights | None = None) -> tuple[Tensor, Tensor]:
        e, last = self.rnn(x, RNNState(state), weights=weights)
        return e, last.h


_Memory: TypeAlias = Literal["none", "gru", "ncgru"]
_Position: TypeAlias = Literal["relative", "rnn-gru", "rnn-ncgru"]


def _make_memory(name: str, d_model: int) -> _NoMemory | RNNMemory:
    return _NoMemory() if name == "none" else RNNMemory(CELLS[name](d_model, d_model))


def _make_position(name: str, start: str, d_model: int) -> _RelativePosition | _RNNPosition:
    if name == "relative":
        return _RelativePosition()
    return _RNNPosition(CELLS[name.removeprefix("rnn-")](d_model, d_model), start)


@dataclass(frozen=True, kw_only=True)
class CompactRecurrentTransformerConfig(TransformerConfig):
    """A CRT; the segment does not count the memory."""

    memory: str = "gru"
    """Memory between segments: "none", or a vector updated by a "gru" or an "ncgru"."""
    position: str = "rnn-gru"
    """How token order is encoded: "relative" attention, or an RNN over the segment, "rnn-gru" or "rnn-ncgru"."""
    position_start: str = "memory"
    """Where the position RNN starts a segment: from the "memory" (zeros if there is none), or from "zero"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_literal(_Memory, memory=self.memory)
        require_literal(_Position, position=self.position)
        require_literal(Literal["memory", "zero"], position_start=self.position_start)
        applies = self.position != "relative" or self.position_start == "memory"
        require(applies, "position_start", self.position_start, "'memory' with position = relative, which has no RNN")


class CompactRecurrentTransformerState(NamedTuple):
    """The memory and the open segment; never more than one segment.

    position: tokens of the open segment so far.
    memory: m at the start of the open segment, (B, d_model), or (B, 0) if there is none.
    reading: the memory RNN's state after the outputs of the open segment.
    placing: the position RNN's state after the tokens of the open segment.
    layers: the attention's keys and values of the open segment, one state per block.
    """

    position: int
    memory: Float[Tensor, "B m"]
    reading: Float[Tensor, "B m"]
    placing: Float[Tensor, "B p"]
    layers: tuple[Any, ...]


@register_model("crt", config=CompactRecurrentTransformerConfig)
class CompactRecurrentTransformer(AdaptiveShell):
    """A Transformer over segments of n tokens, with one persistent memory vector m between them (CRT section 3).

    For every segment: X = embeddings; E = position RNN over X; [m; E] enters the blocks, each of which attends causally
    over memory and segment; the outputs y_1..y_n give the logits, and the memory RNN reads them, starting at m: its
    last state is the next m. The chain is never reset inside a stream, and gradients flow along it until the caller
    detaches the state.

    With `memory="none", position="relative"` it is the Transformer baseline; the other combinations are the ablations
    of CRT Table 8.
    """

    state_class = CompactRecurrentTransformerState

    def __init__(self, config: CompactRecurrentTransformerConfig) -> None:
        super().__init__(config)
        self.memory = _make_memory(config.memory, config.d_model)
        self.position = _make_position(config.position, config.position_start, config.d_model)
        self._make_stack(self._make_attention() for _ in range(config.n_layer))
        self.blocks.apply(draw_biases)
        self._window = AttentionWindow(config.segment_length, mem_len=0)

    def _make_attention(self) -> Mixer:
        config = self.config
        kind = RelativeAttention if config.position == "relative" else SegmentAttention
        options: dict[str, Any] = {"mem_len": 0} if config.position == "relative" else {}
        return kind(
            config.d_model,
            n_heads=config.n_heads,
            d_head=config.d_head,
            segment_length=config.segment_length + self.memory.n_tokens,
            dropout=config.attention_dropout,
            **options,
        )

    @property
    def kind(self) -> str:
        """The model of the paper's tables, or which ablation it is."""
        memory, position = self.config.memory, self.config.position
        if (memory, position) == ("none", "relative"):
            return "Transformer"
        if position == f"rnn-{memory}":
            return f"CRT-{memory.upper()}"
        return f"CRT (memory {memory}, position {position})"

    @property
    def published_row(self) -> str | None:
        """The row of its name."""
        return self.kind

    def body(
        self, x: Float[Tensor, "B L d_model"], state: CompactRecurrentTransformerState | None, **options: Any
    ) -> tuple[Float[Tensor, "B L d_model"], CompactRecurrentTransformerState]:
        """Run segment by segment."""
        state = self._start(x) if state is None else self._checked_state(state, x)
        outputs = []
        weights = self.memory.weights(), self.position.weights()
        for piece in x.split(self._window.pieces(x.shape[1], state.position), 1):
            y, state = self._within_segment(piece, state, *weights, **options)
            outputs.append(y)
        # The memory after the last segment is of the state alone.
        y = with_zero_gradients(torch.cat(outputs, 1), self.memory.parameters() if len(outputs) == 1 else ())
        return self.output_dropout(y), state

    def _start(self, x: Tensor) -> CompactRecurrentTransformerState:
        memory = self.memory.start(x)
        return CompactRecurrentTransformerState(0, memory, memory, self.position.start(memory), self._layers(len(x)))

    def _checked_state(self, state: Any, x: Tensor) -> CompactRecurrentTransformerState:
        entering: CompactRecurrentTransformerState = super()._checked_state(state, x)
        require_position(entering.position, self.config.segment_length)
        start = self.memory.start(x)
        for name, like in (("memory", start), ("reading", start), ("placing", self.position.start(start))):
            require_layout(f"state.{name}", getattr(entering, name), like.shape, like.dtype, like.device)
        return entering

    def _within_segment(
        self,
        x: Tensor,
        state: CompactRecurrentTransformerState,
        of_memory: RecurrentWeights | None,
        of_position: RecurrentWeights | None,
        **options: Any,
    ) -> tuple[Tensor, CompactRecurrentTransformerState]:
        """Run tokens of one segment; the memory stands in front of the segment's first."""
        placed, placing = self.position(x, state.placing, of_position)
        inputs = placed if state.position else torch.cat([self.memory.tokens(state.memory, placed), placed], 1)
        tokens = slice(inputs.shape[1] - x.shape[1], None)
        outputs, layers = self.run_blocks(inputs, state.layers, tokens=tokens, **options)
        y = outputs[:, tokens]
        reading = self.memory.read(y, state.reading, of_memory)
        position = state.position + x.shape[1]
        if position == self.config.segment_length:
            after = CompactRecurrentTransformerState(0, reading, reading, self.position.start(reading), layers)
        else:
            after = CompactRecurrentTransformerState(position, state.memory, reading, placing, layers)
        return y, after
