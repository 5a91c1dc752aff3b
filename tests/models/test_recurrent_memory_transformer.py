"""The Recurrent Memory Transformer: its segments against plain torch, its memory, its gradients, its errors."""

import itertools

import pytest
import torch
from tests.gradients import require_same_gradients
from tests.models.test_block_recurrent_transformer import after_attention, among_tokens
from tests.models.test_timesformer import moved
from torch import Tensor

from recurra.models.recurrent_memory_transformer import RecurrentMemoryTransformer, RecurrentMemoryTransformerConfig

VOCABULARY = 13
SEGMENT, N_MEMORY = 5, 3


def small(**options) -> RecurrentMemoryTransformerConfig:
    defaults = {"n_layer": 2, "d_model": 8, "n_heads": 2, "d_channel_mixing": 12, "dropout": 0.0, "n_memory": N_MEMORY}
    return RecurrentMemoryTransformerConfig(vocab_size=VOCABULARY, **{**defaults, "segment_length": SEGMENT, **options})


def make(**options) -> RecurrentMemoryTransformer:
    return moved(RecurrentMemoryTransformer(small(**options)).double(), 0.1)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


# --- one segment in plain torch, after the papers ---


def segment_pass(model, memory: Tensor, x: Tensor, is_whole: bool) -> tuple[Tensor, Tensor | None]:
    """[read; x; write] through the blocks: the outputs of x, and those of the memory behind it (RMT, section 3.2)."""
    y = torch.cat([memory, x, memory] if is_whole else [memory, x], 1)
    for block in model.blocks:
        mixed = among_tokens(block.attention, y, y.shape[1])
        y = after_attention(block, y, mixed @ block.attention.output_projection.weight.T)
    n_read = memory.shape[1]
    return y[:, n_read : n_read + x.shape[1]], y[:, n_read + x.shape[1] :] if is_whole else None


def by_segments(model, text: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The logits, and the memory that each segment reads."""
    table = model.embedding.tables[0]
    memory = model.first_memory.expand(len(text), -1, -1)
    logits, memories = [], [memory]
    for piece in text.split(SEGMENT, 1):
        y, written = segment_pass(model, memory, table[piece] * 8**0.5, piece.shape[1] == SEGMENT)
        logits.append(y @ table.T + model.head.biases[0])
        if written is not None:
            memory = written
            memories.append(memory)
    return torch.cat(logits, 1), memories


@pytest.mark.parametrize("length", [1, 5, 13, 15])
def test_it_is_the_segments_in_plain_torch_outputs_memory_and_gradients(length):
    model, text = make(), tokens(2, length)
    logits, state = model(text)
    expected, memories = by_segments(model, text)
    require_same_gradients((logits, state.memory), (expected, memories[-1]), [*model.parameters()], 1e-10)


@pytest.mark.parametrize("pieces", [[15], [5, 5, 5], [1] * 15, [3, 7, 5], [12, 2, 1]], ids=str)
def test_the_memory_is_read_and_written_once_a_segment(pieces):
    """However a stream is cut, the blocks see each token once and the memory twice a segment."""
    model, text, state = make(), tokens(1, 15), None
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0][0]))
    memories = [model.initial_state(1).memory[0]]
    for piece in text.split(pieces, 1):
        _, state = model(piece, state)
    rows = torch.cat(seen)
    assert len(rows) == 3 * (SEGMENT + 2 * N_MEMORY)
    x = model.embedding(text)[0]
    for number, segment in enumerate(rows.split(SEGMENT + 2 * N_MEMORY)):
        read, embedded, write = segment.split([N_MEMORY, SEGMENT, N_MEMORY])
        assert torch.equal(read, write)
        assert torch.equal(embedded, x[number * SEGMENT : (number + 1) * SEGMENT])
        memories.append(read)
    assert torch.equal(memories[0], memories[1])
    for one, other in itertools.pairwise(memories[1:]):
        assert not torch.allclose(one, other)  # each segment writes another memory
    assert not torch.allclose(state.memory[0], memories[-1])
    assert state.position == 0


def test_a_model_without_memory_is_refused():
    with pytest.raises(ValueError, match="n_memory is 0; expected at least 1"):
        small(n_memory=0)
