"""What the shell of a language model does for any body: checks, losses, lengths, calls without steps."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from recurra import state as states
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.shell import LanguageModelShell, negative_log_likelihood, require_layers

VOCABULARY = 5
MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()


class Sizes(NamedTuple):
    vocab_size: int = VOCABULARY


class CounterState(NamedTuple):
    layers: tuple[Tensor, ...]


class Counter(LanguageModelShell):
    """Its body multiplies channels by the number of tokens so far, and remembers the shapes of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Sizes()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.head = nn.Linear(4, VOCABULARY)
        self.calls: list[tuple[int, ...]] = []
        self.double()

    def embed(self, tokens):
        return self.embedding(tokens)

    def body(self, x, state, **lengths):
        assert not lengths
        assert x.shape[1]
        self.calls.append(tuple(x.shape[:2]))
        before = (self.initial_state(len(x)) if state is None else state).layers[0]
        return x * (before[:, None] + torch.arange(1.0, x.shape[1] + 1))[..., None], CounterState(
            (before + x.shape[1],)
        )

    def losses(self, hidden, targets):
        return negative_log_likelihood(self.head(hidden), targets)

    def initial_state(self, batch):
        return CounterState((torch.zeros(batch),))

    def require_state(self, state, batch):
        (counts,) = require_layers(state, CounterState, 1)
        if len(counts) != batch:
            raise ValueError(f"state.layers[0] is of {len(counts)} streams; expected {batch}")


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def test_logits_and_losses_carry_the_state():
    model, x, targets = Counter(), tokens(2, 7), tokens(2, 7)
    logits, last = model(x)
    assert last.layers[0].tolist() == [7, 7]
    whole, _ = model.loss(x, targets)
    torch.testing.assert_close(whole, negative_log_likelihood(logits, targets))
    first, state = model.loss(x[:, :3], targets[:, :3])
    second, state = model.loss(x[:, 3:], targets[:, 3:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    assert state.layers[0].tolist() == [7, 7]


def test_a_body_without_lengths_never_sees_padding():
    """Logits and losses are zeros at padding, and each sequence is as it would be alone."""
    model, x, targets = Counter(), tokens(3, 5), tokens(3, 5)
    logits, state = model(x.masked_fill(~MASK, -100), mask=MASK)
    losses, _ = model.loss(x, targets, mask=MASK)
    assert state.layers[0].tolist() == [3, 4, 0]
    assert model.calls == 2 * [(2, 3), (1, 1)]
    assert logits[~MASK].eq(0).all()
    assert losses[~MASK].eq(0).all()
    for row in range(2):
        alone, _ = model(x[row : row + 1, MASK[row]])
        torch.testing.assert_close(logits[row, MASK[row]], alone[0])
        expected = negative_log_likelihood(alone, targets[row : row + 1, MASK[row]])
        torch.testing.assert_close(losses[row, MASK[row]], expected[0])
    packed, last = model(x[MASK][None], cu_seqlens=torch.tensor([0, 3, 7, 7]))
    torch.testing.assert_close(packed[0], logits[MASK])
    assert torch.equal(last.layers[0], state.layers[0])


def test_no_token_leaves_the_stream_where_it_is():
    model = Counter()
    logits, start = model(tokens(2, 0))
    assert logits.shape == (2, 0, VOCABULARY)
    assert logits.requires_grad
    assert start.layers[0].tolist() == [0, 0]
    _, state = model(tokens(2, 3))
    losses, same = model.loss(tokens(2, 0), tokens(2, 0), state)
    assert losses.shape == (2, 0)
    losses.sum().backward()
    assert same is state
    assert model.calls == [(2, 3)]


@pytest.mark.parametrize("length", [0, 1])
def test_a_state_is_checked_even_without_tokens(unchecked, length):
    model = LanguageModel(LanguageModelConfig(VOCABULARY, n_layer=2, d_model=4))
    with pytest.raises(
        ValueError, match=r"state\.h is complex64 \(3, 4, 1, 1\) on cpu; expected complex64 \(2, 4, 1, 1\)"
    ):
        model(tokens(2, length), model.initial_state(3))
    with pytest.raises(TypeError, match="state is a CounterState; expected a LanguageModelState, or None to start"):
        model(tokens(2, length), CounterState((torch.zeros(2),)))


def test_targets_of_another_shape_are_refused(unchecked):
    """As many numbers in another order would pair each token with another one's target."""
    model = LanguageModel(LanguageModelConfig(vocab_size=VOCABULARY, n_layer=1, d_model=8, mixer="min-gru"))
    tokens, targets = torch.randint(VOCABULARY, (3, 6)), torch.randint(VOCABULARY, (6, 3))
    with pytest.raises(ValueError, match=r"^targets is .*; expected shape \(3, 6\)"):
        model.loss(tokens, targets)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_targets_that_are_no_indices_are_refused(unchecked, dtype):
    """A mask has the shape of targets, and would be read as the classes 0 and 1."""
    model = LanguageModel(LanguageModelConfig(vocab_size=VOCABULARY, n_layer=1, d_model=8, mixer="min-gru"))
    tokens = torch.randint(VOCABULARY, (3, 6))
    with pytest.raises(ValueError, match=r"^targets is .* \(3, 6\) on cpu; expected int64 or int32"):
        model.loss(tokens, tokens.to(dtype))


def test_a_state_of_streams_at_different_places_can_be_passed_on_without_steps():
    options = {"n_heads": 2, "window": 5}
    config = LanguageModelConfig(
        vocab_size=VOCABULARY, n_layer=1, d_model=8, mixer="rotary-attention", mixer_options=options
    )
    model = LanguageModel(config)
    tokens, mask = torch.randint(VOCABULARY, (2, 6)), torch.ones(2, 6, dtype=torch.bool)
    mask[1, 3:] = False
    _, state = model(tokens, mask=mask)
    assert isinstance(state.layers[0], states.Ragged)
    _, same = model(tokens[:, :0], state)
    assert same is state
    reset = torch.zeros(2, 6, dtype=torch.bool)
    reset[:, 0] = True
    torch.testing.assert_close(model(tokens, state, reset=reset)[0], model(tokens)[0])
    with pytest.raises(ValueError, match="state is a Ragged of 2 streams; expected one of 3"):
        model(torch.zeros(3, 0, dtype=torch.int64), state)
