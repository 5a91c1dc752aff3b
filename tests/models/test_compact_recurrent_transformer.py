"""The Compact Recurrent Transformer: its equations, its segments, its ablations, its errors."""

import pytest
import torch
from tests.gradients import require_same_gradients

from recurra import state as states
from recurra.models.compact_recurrent_transformer import CompactRecurrentTransformer, CompactRecurrentTransformerConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig
from recurra.ops.cells.orthogonal import Cayley


def small(**options) -> CompactRecurrentTransformerConfig:
    defaults = {"vocab_size": 13, "n_layer": 2, "d_model": 8, "n_heads": 2, "d_channel_mixing": 12, "dropout": 0.0}
    return CompactRecurrentTransformerConfig(**{**defaults, "segment_length": 5, **options})


def make(memory="gru", position="rnn-gru", **options) -> CompactRecurrentTransformer:
    return CompactRecurrentTransformer(small(memory=memory, position=position, **options)).double()


def by_the_equations(model: CompactRecurrentTransformer, tokens: torch.Tensor) -> torch.Tensor:
    """CRT section 3 for one layer of plain attention, segment by segment and token by token."""
    n, (block,) = model.config.segment_length, model.blocks
    attention = block.attention
    m = torch.zeros(len(tokens), model.config.d_model, dtype=torch.float64)
    logits = []
    for segment in tokens.split(n, 1):
        h, rows = m, [m]
        for x in model.embedding(segment).unbind(1):
            h = model.position.rnn.cell(x, h)
            rows.append(h)
        outputs = []
        for i in range(1, len(rows)):  # the last layer gives no output for the memory
            q = attention.queries(rows[i]).unflatten(-1, (attention.n_heads, -1))
            pairs = [attention.keys_values(row).chunk(2, -1) for row in rows[: i + 1]]
            k = torch.stack([p[0].unflatten(-1, (attention.n_heads, -1)) for p in pairs], 1)
            v = torch.stack([p[1].unflatten(-1, (attention.n_heads, -1)) for p in pairs], 1)
            weights = (torch.einsum("bhd,bjhd->bhj", q, k) / attention.d_head**0.5).softmax(-1)
            mixed = attention.output_projection(torch.einsum("bhj,bjhd->bhd", weights, v).flatten(1))
            x = block.norm_attention(rows[i] + mixed)
            outputs.append(block.norm_feed_forward(x + block.feed_forward(x)))
        for y in outputs:
            m = model.memory.rnn.cell(y, m)
        logits += [model.head(y[:, None]) for y in outputs]
    return torch.cat(logits, 1)


def test_one_layer_computes_the_equations():
    model, tokens = make(n_layer=1), torch.randint(13, (2, 13))
    logits, expected = model(tokens)[0], by_the_equations(model, tokens)
    require_same_gradients(logits, expected, [*model.parameters()], 1e-10)


def test_a_cut_gives_the_whole_without_a_memory():
    """With one, tests/contracts shows it."""
    model, tokens = make("none"), torch.randint(13, (2, 17))
    whole, last = model(tokens)
    state, outputs = None, []
    for piece in tokens.split([3, 7, 1, 6], 1):
        y, state = model(piece, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-10, atol=1e-10)
    assert state.position == last.position == 2
    for one, other in zip(states.tensors(state), states.tensors(last)):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_without_memory_and_with_relative_attention_it_is_the_transformer():
    model = make("none", "relative")
    shape = {"vocab_size": 13, "n_layer": 2, "d_model": 8, "n_heads": 2, "d_channel_mixing": 12, "dropout": 0.0}
    baseline = TransformerXL(TransformerXLConfig(**shape, segment_length=5, mem_len=0, share_biases=False)).double()
    baseline.load_state_dict(model.state_dict())
    tokens = torch.randint(13, (2, 12))
    torch.testing.assert_close(model(tokens)[0], baseline(tokens)[0], rtol=1e-10, atol=1e-10)


def test_position_start_is_where_the_position_rnn_starts():
    model, zero = make(), make(position_start="zero")
    zero.load_state_dict(model.state_dict())
    tokens = torch.randint(13, (1, 10))
    torch.testing.assert_close(model(tokens)[0][:, :5], zero(tokens)[0][:, :5])  # the memory is zeros at first
    assert not torch.allclose(model(tokens)[0][:, 5:], zero(tokens)[0][:, 5:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_length": 0}, "segment_length is 0"),
        ({"memory": "lstm"}, "memory is 'lstm'; expected one of none, gru, ncgru"),
        ({"position": "sinusoid"}, "position is 'sinusoid'; expected one of relative, rnn-gru, rnn-ncgru"),
        ({"position_start": "one"}, "position_start is 'one'"),
        ({"position": "relative", "position_start": "zero"}, "position_start is 'zero'; expected 'memory' with"),
    ],
)
def test_impossible_shapes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("position", ["rnn-gru", "relative"])
def test_the_zero_memory_of_a_streams_start_leaves_gradients_as_they_are(norm, position):
    """A vector of exact zeros through the norms of many layers would multiply its gradient by 300 in each."""
    torch.manual_seed(0)
    config = CompactRecurrentTransformerConfig(
        vocab_size=13, n_layer=16, d_model=12, n_heads=2, d_channel_mixing=20, norm=norm, position=position,
        segment_length=5, dropout=0.0,
    )  # fmt: skip
    model = CompactRecurrentTransformer(config)
    tokens = torch.randint(13, (3, 11))

    def gradient_norm(state) -> float:
        model.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:], state)[0].mean().backward()
        return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()

    _, state = model(tokens[:, :-1])
    assert gradient_norm(None) == pytest.approx(gradient_norm(states.detach(state)), rel=0.5)


def test_an_orthogonal_matrix_is_made_once_a_call(monkeypatch):
    model, tokens = make("ncgru", "rnn-ncgru"), torch.randint(13, (2, 17))
    expected, calls = model(tokens)[0], []
    gradients = torch.autograd.grad(expected.sin().sum(), model.parameters())
    transform = Cayley.forward
    monkeypatch.setattr(Cayley, "forward", lambda self, entries: calls.append(self) or transform(self, entries))
    model(tokens)
    assert len(calls) == 2  # the memory's and the position's, in four segments
    for part in (model.memory, model.position):
        monkeypatch.setattr(part, "weights", lambda: None)
    logits = model(tokens)[0]
    assert len(calls) == 2 + 8
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    for each, shared in zip(torch.autograd.grad(logits.sin().sum(), model.parameters()), gradients):
        torch.testing.assert_close(each, shared, rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("original"):
                parameter.zero_()
    assert not torch.allclose(model(tokens)[0], expected)  # nothing is kept beyond the call
