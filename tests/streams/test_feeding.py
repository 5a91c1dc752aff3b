import torch

from recurra import state as states
from recurra.streams import stream
from recurra.streams.stream import _feed, feed_together

from .conftest import VOCABULARY


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def test_long_texts_go_in_pieces(model, monkeypatch):
    x = tokens(2, 19)
    whole, _ = _feed(model, x)
    monkeypatch.setattr(stream, "_TOKENS_PER_CALL", 6)
    lengths = []
    model.embedding.register_forward_hook(lambda _, inputs, __: lengths.append(inputs[0].shape[1]))
    pieces, _ = _feed(model, x)
    assert lengths == [3, 3, 3, 3, 3, 3, 1]
    torch.testing.assert_close(pieces, whole, rtol=1e-10, atol=1e-11)


def test_only_the_last_step_goes_through_the_head(model):
    shapes = []
    model.head.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape)))
    _feed(model, tokens(2, 9))
    assert shapes == [(2, 12)]


def test_a_model_with_logits_alone(gateloop):
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = gateloop
            self.hidden = torch.nn.Linear(1, 1)  # a layer of that name is no method that gives hidden states
            self.head = torch.nn.Linear(1, 1)

        def forward(self, x, state=None):
            return self.model(x, state)

    x = tokens(2, 9)
    logits, _ = _feed(Wrapped().eval(), x)
    torch.testing.assert_close(logits, _feed(gateloop, x)[0], rtol=1e-11, atol=1e-11)
    assert logits._base is None


def test_streams_of_all_lengths_together(model):
    lengths_before_and_now = [(0, 3), (4, 11), (0, 1), (5, 6), (10, 6), (3, 2), (2, 9), (4, 11), (4, 2)]
    texts = [tokens(1, now)[0] for _, now in lengths_before_and_now]
    started = [_feed(model, tokens(1, before))[1] if before else None for before, _ in lengths_before_and_now]
    kept = [[tensor.clone() for tensor in states.tensors(one)] for one in started]
    for text, before, (found, after) in zip(texts, started, feed_together(model, texts, started)):
        logits, state = _feed(model, text[None], before)
        torch.testing.assert_close(found, logits[0], rtol=1e-10, atol=1e-11)
        assert type(after) is type(state)
        for got, expected in zip(states.tensors(after), states.tensors(state), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)
            assert got._base is None
    for one, before in zip(started, kept):
        assert all(torch.equal(*pair) for pair in zip(before, states.tensors(one), strict=True))


def test_equal_layouts_make_one_call(gateloop):
    calls = []
    gateloop.embedding.register_forward_hook(lambda _, inputs, __: calls.append(tuple(inputs[0].shape)))
    started = [_feed(gateloop, tokens(1, length))[1] for length in (2, 9, 4)]
    calls.clear()
    feed_together(gateloop, [tokens(1, length)[0] for length in (3, 5, 3)], started)
    assert calls == [(3, 3), (1, 2)]
