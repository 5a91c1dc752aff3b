"""Recorded steps: the model's own numbers for every steady state, and a refusal where a recording would be wrong."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from recurra.decoding.packing import pack_linear_layers
from recurra.decoding.steps import TracedStep, prepare
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors

pytestmark = pytest.mark.compile  # while torch.jit traces, sizes are tensors, which the shape checks refuse


def language_model(mixer, **options):
    config = LanguageModelConfig(
        vocab_size=31, n_layer=2, d_model=24, d_channel_mixing=40, mixer=mixer, mixer_options=options
    )
    return LanguageModel(config).eval()


@pytest.mark.parametrize(("mixer", "dtype"), [("gateloop", None), ("retnet", "float32"), ("s5", "int8")])
def test_a_recorded_stream_is_the_models(mixer, dtype):
    model = language_model(mixer, **({"n_heads": 2} if mixer == "retnet" else {}))
    model = model if dtype is None else pack_linear_layers(model, dtype)
    recorded, state, other = TracedStep(model, 31), None, None
    for piece in torch.randint(31, (1, 15)).split([3, 1, 1, 1, 5, 1, 1, 2], dim=1):
        expected, state = model(piece, state)
        logits, other = recorded(piece, other)
        assert torch.equal(logits, expected)
        assert type(other) is type(state)
        assert all(map(torch.equal, tensors(other), tensors(state)))


@pytest.mark.parametrize("token", [31, -1])
def test_a_token_outside_the_vocabulary_is_named(token):
    model, tokens = language_model("gateloop"), torch.tensor([[3]])
    recorded = TracedStep(model, 31)
    with torch.no_grad():
        _, state = recorded(tokens)
        with pytest.raises(IndexError, match=f"the id {token}; expected ids from 0 to 30"):
            recorded(torch.full_like(tokens, token), state)
        torch.testing.assert_close(recorded(tokens, state)[0], model(tokens, state)[0])


def test_a_callers_autocast_does_not_stay():
    """The recording for two rows is made in the first call that has them."""
    model, tokens = language_model("retnet", n_heads=2), torch.randint(31, (2, 3))
    recorded = TracedStep(model, 31)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = recorded(tokens[:, :1])
        recorded(tokens[:, 1:2], state)
    (expected, after), (logits, state) = model(tokens[:, :1]), recorded(tokens[:, :1])
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        recorded(tokens[:, 1:2], state)[0], model(tokens[:, 1:2], after)[0], rtol=1e-6, atol=1e-6
    )


class Counted(NamedTuple):
    total: Tensor
    position: int


class Counter(nn.Module):
    """Its output depends on a plain number in its state."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(31))

    def forward(self, tokens, state=None):
        total, position = (tokens.new_zeros(tokens.shape[0]), 0) if state is None else state
        logits = self.weight.expand(*tokens.shape, 31) * position
        return logits, Counted(total + tokens.sum(1), position + tokens.shape[1])


class Threshold(Counter):
    """It decides in Python about a number in its state: a recording keeps the decision of one step."""

    def forward(self, tokens, state=None):
        total = tokens.new_zeros(tokens.shape[0]) if state is None else state.total
        logits = self.weight.expand(*tokens.shape, 31) * (1.0 if int(total) < 40 else 2.0)
        return logits, Counted(total + 15, 0)


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(ValueError, match="steps cannot be recorded"):
        TracedStep(Counter().eval(), 31)
    with pytest.raises(ValueError, match="a recorded step of Threshold gives other numbers"):
        TracedStep(Threshold().eval(), 31)
    with pytest.raises(ValueError, match="steps cannot be recorded"):
        TracedStep(language_model("relative-attention", n_heads=2), 31)
    with pytest.raises(ValueError, match="in training mode"):
        TracedStep(language_model("gateloop").train(), 31)


@pytest.mark.parametrize("mixer", ["rotary-attention", "relative-attention"])
def test_a_prepared_model_runs_under_a_callers_autocast(mixer):
    model = language_model(mixer, n_heads=2)
    prepared, tokens = prepare(model), torch.randint(31, (2, 5))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, found = model(tokens)[0], prepared(tokens)[0]
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=0.05)
