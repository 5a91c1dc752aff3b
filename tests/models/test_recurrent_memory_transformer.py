"""The Recurrent Memory Transformer: its segments against plain torch, its memory, its gradients, its errors."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
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
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)  # the frequencies are rounded to float32
    torch.testing.assert_close(state.memory, memories[-1], rtol=1e-6, atol=1e-6)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(logits.sin().sum(), parameters.values(), allow_unused=True)
    wanted = torch.autograd.grad(expected.sin().sum(), parameters.values(), allow_unused=True)
    for name, one, other in zip(parameters, found, wanted):
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


# --- the contract ---


@given(pieces=st.lists(st.sampled_from([0, 1, 2, 4, 5, 6, 11]), min_size=2, max_size=5), before=st.integers(0, 9))
@example(pieces=[4, 0, 11, 1, 6, 2], before=3)
@settings(max_examples=6, deadline=None, derandomize=True)  # more cuts are drawn in tests/contracts
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_any_cut_gives_the_whole(norm, pieces, before):
    """Logits, the last state, and gradients, also those of the entering state."""
    torch.manual_seed(0)
    model, text, entering = make(norm=norm), tokens(2, sum(pieces)), None
    if before:
        _, entering = model(tokens(2, before))
        entering = states.map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(), entering)
    leaves = [*model.parameters(), *states.tensors(entering)]

    def results(cuts: list[int]) -> list[Tensor]:
        state, logits = entering, []
        for piece in text.split(cuts, 1):
            y, state = model(piece, state)
            logits.append(y)
        flat = [torch.cat(logits, 1), *states.tensors(state)]
        total = sum(tensor.sin().sum() for tensor in flat)
        places.append(state.position)
        if not total.requires_grad:
            return flat
        return [*flat, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)]

    places: list[int] = []
    for one, other in zip(results(pieces), results([sum(pieces)]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    assert places == [(before + sum(pieces)) % SEGMENT] * 2


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


def test_every_parameter_gets_a_gradient():
    model = make(cutoffs=[4, 7])
    model.loss(tokens(4, 12), tokens(4, 12))[0].sum().backward()
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.abs().sum() > 0] == []


@pytest.mark.parametrize("options", [{}, {"cutoffs": [4, 7]}, {"tie_embeddings": False}], ids=str)
def test_the_loss_is_that_of_the_logits(options):
    model, text, targets = make(**options), tokens(2, 12), tokens(2, 12)
    targets[1, 4:8] = -100
    losses, _ = model.loss(text, targets)
    chosen = model(text)[0].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(losses, -chosen * (targets >= 0), rtol=1e-10, atol=1e-12)


def test_the_state_never_exceeds_a_segment_and_the_memory():
    model = make()
    sizes = [states.n_bytes(model(tokens(1, length))[1]) for length in (4, 9, 104, 504)]
    assert len(set(sizes)) == 1
    keys_and_values, n_layer = 2 * 8, 2
    per_layer = (N_MEMORY + SEGMENT - 1) * keys_and_values
    assert sizes[0] == 8 * (N_MEMORY * 8 + n_layer * per_layer)
    _, state = model(tokens(1, SEGMENT))
    assert states.n_bytes(state) == 8 * N_MEMORY * 8
    assert sum(t.untyped_storage().nbytes() for t in states.tensors(state)) == states.n_bytes(state)


def test_sequences_of_different_lengths_are_as_alone():
    model, text = make(), tokens(3, 9)
    mask = torch.arange(9) < torch.tensor([[9], [2], [6]])
    logits, state = model(text, mask=mask)
    assert isinstance(state, states.Ragged)
    packed, _ = model(text[mask][None], cu_seqlens=torch.tensor([0, 9, 11, 17]))
    torch.testing.assert_close(packed[0], logits[mask], rtol=1e-10, atol=1e-12)
    more, _ = model(text, state)
    for row, length in enumerate((9, 2, 6)):
        whole, _ = model(torch.cat([text[row, :length], text[row]])[None])
        torch.testing.assert_close(torch.cat([logits[row, :length], more[row]]), whole[0], rtol=1e-9, atol=1e-11)


def test_states_stay_float32_under_autocast_and_in_bfloat16():
    model, text = make().float(), tokens(2, 7)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = model(text, model(text)[1])
    assert {tensor.dtype for tensor in states.tensors(state)} == {torch.float32}
    short = model.bfloat16()
    logits, state = short(text, short(text)[1])
    assert logits.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in states.tensors(state)} == {torch.float32}


def test_dropouts_act_in_training_alone():
    text = tokens(2, 9)
    for name in ("dropout", "attention_dropout", "embedding_dropout"):
        model = make(**{name: 0.5})
        assert not torch.equal(model(text)[0], model(text)[0]), name
        model.eval()
        assert torch.equal(model(text)[0], model(text)[0]), name


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


def test_odd_channels_are_refused():
    with pytest.raises(ValueError, match="d_model is 9; expected an even number"):
        make(d_model=9, n_heads=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": 5}, "state.position is 5; expected a number from 0 to 4"),
        ({"memory": torch.zeros(2, 4, 8).double()}, r"state.memory is float64 \(2, 4, 8\) .* \(2, 3, 8\)"),
        ({"memory": torch.zeros(2, 3, 8)}, r"state.memory is float32 .* expected float64 \(2, 3, 8\)"),
        ({"layers": ()}, "state.layers has 0 states; expected one state for each of 2 layers"),
    ],
    ids=["position", "memory", "type", "layers"],
)
def test_other_states_are_refused(change, message):
    model = make()
    _, state = model(tokens(2, 3))
    with pytest.raises(ValueError, match=message):
        model(tokens(2, 1), state._replace(**change))
    with pytest.raises(ValueError, match=r"expected float64 \(3, 3, 8\)"):
        model(tokens(3, 1), state)


def test_it_has_no_graph_for_any_number_of_tokens():
    assert "segment" in make().why_not_exportable()
