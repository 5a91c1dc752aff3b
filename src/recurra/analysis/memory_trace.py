"""A stream through a Compact Recurrent Transformer, with what passes between its segments left open to derivatives."""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from recurra.mixers.rnn import RNN
from recurra.models import CompactRecurrentTransformer, CompactRecurrentTransformerState
from recurra.models.segment_memory import RNNMemory
from recurra.state import map_tensors


class MemoryTrace(NamedTuple):
    """What the memory RNN read and made, float64, on the CPU; the graph behind it is kept.

    rnn: the memory RNN that ran, its weights without gradients.
    outputs: the last block's outputs y, one tensor per segment.
    memories: the memory that each segment began with. The second depends on the first segment's outputs, and so on.
    states: the memory RNN's states h after each of a segment's outputs.
    """

    rnn: RNN
    outputs: list[Float[Tensor, "1 n d"]]
    memories: list[Float[Tensor, "1 d"]]
    states: list[Float[Tensor, "1 n d"]]


def memory_rnn(model: nn.Module) -> RNN:
    """Give the RNN that keeps a model's memory vector.

    Raises:
        ValueError: the model has none.
    """
    if isinstance(model, CompactRecurrentTransformer) and isinstance(model.memory, RNNMemory):
        return model.memory.rnn
    memory = f" with memory {model.config.memory!r}" if isinstance(model, CompactRecurrentTransformer) else ""
    raise ValueError(
        f"{type(model).__name__}{memory} has no memory vector between segments; recipes with `experiment: text-crt` "
        "and `model.memory: gru` or `ncgru` have one"
    )


def trace_memory(
    model: CompactRecurrentTransformer,
    tokens: Int[Tensor, "streams L"],
    state: CompactRecurrentTransformerState | None = None,
) -> MemoryTrace:
    """Run a copy of the model in float64 and in evaluation mode, and keep what its memory RNN read and made.

    Args:
        model: a model with a memory; it stays as it was.
        tokens: one stream of at least two whole segments.
        state: what the stream left before them, at a border of segments; None for its start.

    Raises:
        ValueError: the model has no memory vector, the tokens are not two or more whole segments of one stream, or the
            state is inside a segment.
    """
    memory_rnn(model)
    _require_whole_segments(tokens, model.config.segment_length, state)
    copy = deepcopy(model).to("cpu", torch.float64).eval().requires_grad_(False)
    rnn = memory_rnn(copy)
    trace = MemoryTrace(rnn, [], [], [])

    def keep(module: nn.Module, arguments: tuple[Any, ...], result: tuple[Any, ...]) -> None:
        trace.outputs.append(arguments[0])
        trace.memories.append(arguments[1].h)
        trace.states.append(result[0])

    rnn.register_forward_hook(keep)
    # The embedded tokens are what the graph begins with.
    copy.embedding.register_forward_hook(lambda module, arguments, x: x.detach().requires_grad_())
    state = map_tensors(lambda tensor: tensor.detach().to("cpu", torch.float64), state)
    # The fused attention kernels have no rule for many vectors at once: torch would warn, and loop over them.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        copy.hidden(tokens.cpu(), state)
    return trace


def _require_whole_segments(tokens: Tensor, n: int, state: CompactRecurrentTransformerState | None) -> None:
    rows, length = tokens.shape
    if rows != 1 or length < 2 * n or length % n:
        raise ValueError(
            f"tokens are {rows} streams of {length} tokens; expected 1 stream of two or more whole segments of {n} "
            "tokens each"
        )
    if state is not None and state.position:
        raise ValueError(
            f"state is {state.position} tokens inside a segment; expected one from the end of a segment of {n} tokens"
        )
