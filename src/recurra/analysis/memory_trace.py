"""Run a stream through a Compact Recurrent Transformer and keep the graph between its segments, for derivatives."""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from recurra.checks import kind_of, sentence
from recurra.mixers.rnn import RNN
from recurra.models import CompactRecurrentTransformer, CompactRecurrentTransformerState
from recurra.models.segment_memory import RNNMemory
from recurra.state import map_tensors


class MemoryTrace(NamedTuple):
    """The inputs and outputs of the memory RNN with their graph; float64, on the CPU.

    rnn: the memory RNN, its weights without gradients.
    outputs: the last block's outputs y, one tensor per segment.
    memories: the memory at the start of each segment. The second depends on the first segment's outputs, and so on.
    states: the memory RNN's states h after each of a segment's outputs.
    """

    rnn: RNN
    outputs: list[Float[Tensor, "1 n d"]]
    memories: list[Float[Tensor, "1 d"]]
    states: list[Float[Tensor, "1 n d"]]


def memory_rnn(model: nn.Module) -> RNN:
    """Return the RNN that computes a model's memory vector.

    Raises:
        ValueError: the model has none.
    """
    if isinstance(model, CompactRecurrentTransformer) and isinstance(model.memory, RNNMemory):
        return model.memory.rnn
    memory = f" with memory {model.config.memory!r}" if isinstance(model, CompactRecurrentTransformer) else ""
    mend = "use a recipe with `experiment: text-crt` and `model.memory: gru` or `ncgru`"
    raise ValueError(sentence("model", f"{kind_of(model)}{memory}", "one with a memory vector between segments", mend))


def trace_memory(
    model: CompactRecurrentTransformer,
    tokens: Int[Tensor, "streams L"],
    state: CompactRecurrentTransformerState | None = None,
) -> MemoryTrace:
    """Run a copy of the model in float64 and in evaluation mode, and keep the inputs and outputs of its memory RNN.

    Args:
        model: a model with a memory; it is left unchanged.
        tokens: one stream of at least two whole segments.
        state: the state of the stream before them, at the end of a segment; None starts a stream.

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
    # The graph begins at the embedded tokens.
    copy.embedding.register_forward_hook(lambda module, arguments, x: x.detach().requires_grad_())
    state = map_tensors(lambda tensor: tensor.detach().to("cpu", torch.float64), state)
    # The fused attention kernels have no rule for many vectors at once: torch would warn and loop over them.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        copy.hidden(tokens.cpu(), state)
    return trace


def _require_whole_segments(tokens: Tensor, n: int, state: CompactRecurrentTransformerState | None) -> None:
    n_streams, length = tokens.shape
    if n_streams != 1 or length < 2 * n or length % n:
        expected = f"one stream of two or more whole segments of {n} tokens, (1, {2 * n}) for two"
        raise ValueError(sentence("tokens", kind_of(tokens), expected))
    if state is not None and state.position:
        came = f"{state.position} tokens into a segment"
        raise ValueError(sentence("state", came, f"one at the end of a segment of {n} tokens"))
