"""The Recurrent Memory Transformer: its segments against plain torch, its memory, its gradients, its errors."""

import itertools

import pytest
import torch
from tests.gradients import require_same_gradients
from torch import Tensor
from torch.nn import functional

from recurra import state as states
from recurra.models.recurrent_memory_transformer import RecurrentMemoryTransformer, RecurrentMemoryTransformerConfig

VOCABULARY = 13
SEGMENT, N_MEMORY = 5, 3


def small(**options) -> RecurrentMemoryTransformerConfig:
    defaults = {"n_layer": 2, "d_model": 8, "n_heads": 2, "d_channel_mixing": 12, "dropout": 0.0, "n_memory": N_MEMORY}
    return RecurrentMemoryTransformerConfig(vocab_size=VOCABULARY, **{**defaults, "segment_length": SEGMENT, **options})


def make(**options) -> RecurrentMemoryTransformer:
    model = RecurrentMemoryTransformer(small(**options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # so that everything matters
    return model


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


# --- one segment in plain torch, after the papers ---


def attend(attention, x: Tensor) -> Tensor:
    """Causal attention with relative positions, score by score (Transformer-XL, section 3.3)."""
    n_heads, d_head, d_model = attention.n_heads, attention.d_head, x.shape[-1]

    def heads(flat: Tensor) -> Tensor:
        return flat.view(*flat.shape[:-1], n_heads, d_head)

    w_k, w_v = attention.keys_values.weight.chunk(2)
    q, k, v = (heads(functional.linear(x, w)) for w in (attention.queries.weight, w_k, w_v))
    frequencies = torch.tensor([10000.0 ** (-2 * i / d_model) for i in range(d_model // 2)]).double()
    mixed = []
    for i in range(x.shape[1]):
        scores = []
        for j in range(i + 1):
            angles = (i - j) * frequencies
            r = heads(functional.linear(torch.cat([angles.sin(), angles.cos()]), attention.position_keys.weight))
            content = ((q[:, i] + attention.content_bias) * k[:, j]).sum(-1)
            position = ((q[:, i] + attention.position_bias) * r).sum(-1)
            scores.append((content + position) / d_head**0.5)
        weights = torch.stack(scores, 1).softmax(1)  # (B, i + 1, H)
        mixed.append((weights[..., None] * v[:, : i + 1]).sum(1).flatten(1))
    return functional.linear(torch.stack(mixed, 1), attention.output_projection.weight)


def segment_pass(model, memory: Tensor, x: Tensor, is_whole: bool) -> tuple[Tensor, Tensor | None]:
    """[read; x; write] through the blocks: the outputs of x, and those of the memory behind it (RMT, section 3.2)."""
    y = torch.cat([memory, x, memory] if is_whole else [memory, x], 1)
    for block in model.blocks:
        y = block.norm_attention(y + attend(block.attention, y))
        up, down = block.feed_forward[0], block.feed_forward[3]
        hidden = torch.relu(functional.linear(y, up.weight, up.bias))
        y = block.norm_feed_forward(y + functional.linear(hidden, down.weight, down.bias))
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
    tolerance = 1e-6  # the frequencies are rounded to float32
    require_same_gradients((logits, state.memory), (expected, memories[-1]), [*model.parameters()], tolerance)


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


def test_an_open_segment_leaves_the_memory_alone():
    model = make()
    _, state = model(tokens(2, SEGMENT))
    for _ in range(SEGMENT - 1):
        _, following = model(tokens(2, 1), state)
        assert following.memory is state.memory
        state = following
    _, following = model(tokens(2, 1), state)
    assert not torch.allclose(following.memory, state.memory)


def test_the_memory_carries_a_segment_to_the_next():
    """Same last segment, another first one: the logits differ, and without the memory they do not."""
    model, last = make(), tokens(1, SEGMENT)
    one, other = (torch.cat([torch.full((1, SEGMENT), first), last], 1) for first in (1, 2))
    assert not torch.allclose(model(one)[0][:, SEGMENT:], model(other)[0][:, SEGMENT:])
    alone, _ = model(last)
    memory = model.initial_state(1).memory
    _, state = model(one[:, :SEGMENT])
    torch.testing.assert_close(model(last, state._replace(memory=memory))[0], alone)


def test_gradients_reach_the_first_segment_through_the_memory_until_the_state_is_detached():
    model, text, targets = make(), tokens(2, 3 * SEGMENT), tokens(2, SEGMENT)

    def gradient(detach: bool) -> Tensor | None:
        embedded, state = [], None
        hook = model.embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
        for segment in text[:, : 2 * SEGMENT].split(SEGMENT, 1):
            _, state = model(segment, state)
            state = states.detach(state) if detach else state
        losses, _ = model.loss(text[:, 2 * SEGMENT :], targets, state)
        hook.remove()
        return torch.autograd.grad(losses.sum(), embedded[0], allow_unused=True)[0]

    assert gradient(detach=True) is None
    through = gradient(detach=False)
    assert (through.abs().sum(-1) > 0).all()  # every token of the first segment
    embedded = []
    hook = model.embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    ignored = torch.full((2, 2 * SEGMENT), -100)
    losses, _ = model.loss(text, torch.cat([ignored, targets], 1))
    hook.remove()
    (at_once,) = torch.autograd.grad(losses.sum(), embedded[0])
    torch.testing.assert_close(through, at_once[:, :SEGMENT], rtol=1e-9, atol=1e-12)


def test_the_first_memory_is_learned():
    """It starts every stream of a batch, and gets a gradient from the first segment and from later ones."""
    model, text, targets = make(), tokens(3, 2 * SEGMENT), tokens(3, 2 * SEGMENT)
    start = model.initial_state(3).memory
    assert torch.equal(start, model.first_memory.expand(3, -1, -1))
    for counted in (slice(0, SEGMENT), slice(SEGMENT, None)):
        masked = torch.full_like(targets, -100)
        masked[:, counted] = targets[:, counted]
        (gradient,) = torch.autograd.grad(model.loss(text, masked)[0].sum(), model.first_memory)
        assert (gradient.abs().sum(1) > 0).all()
    before = model.first_memory.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.loss(text, targets)[0].mean().backward()
    optimizer.step()
    assert not torch.equal(model.first_memory, before)
    assert torch.equal(start[0], before)  # a state that was given out stays as it was


@pytest.mark.parametrize("options", [{}, {"cutoffs": [4, 7]}, {"tie_embeddings": False}], ids=str)
def test_the_loss_is_that_of_the_logits(options):
    model, text, targets = make(**options), tokens(2, 12), tokens(2, 12)
    targets[1, 4:8] = -100
    losses, _ = model.loss(text, targets)
    chosen = model(text)[0].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(losses, -chosen * (targets >= 0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_memory": 0}, "n_memory is 0; expected at least 1"),
        ({"segment_length": 0}, "segment_length is 0"),
        ({"cutoffs": [5, 3]}, r"cutoffs is \[5, 3\]"),
        ({"norm": "none"}, "norm is 'none'; expected one of post, pre"),
    ],
)
def test_impossible_shapes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)
