"""Recorded steps: what cannot be recorded is refused, and a caller's autocast does not stay in what later calls run."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from recurra.decoding.steps import CompiledStep, prepare
from recurra.models.language_model import LanguageModel, LanguageModelConfig

pytestmark = pytest.mark.compile  # while torch records, its tracer stands between the shape checks and their tensors


def language_model(mixer, **options):
    config = LanguageModelConfig(
        vocab_size=31, n_layer=2, d_model=24, d_channel_mixing=40, mixer=mixer, mixer_options=options
    )
    return LanguageModel(config).eval()


def test_a_callers_autocast_does_not_stay():
    """The recording for two rows is made in the first call that has them."""
    model, tokens = language_model("retnet", n_heads=2), torch.randint(31, (2, 3))
    recorded = CompiledStep(model, 31)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = recorded(tokens[:, :1])
        recorded(tokens[:, 1:2], state)
    (expected, after), (logits, state) = model(tokens[:, :1]), recorded(tokens[:, :1])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        recorded(tokens[:, 1:2], state)[0], model(tokens[:, 1:2], after)[0], rtol=1e-5, atol=1e-5
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


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(ValueError, match="steps cannot be recorded"):
        CompiledStep(Counter().eval(), 31)
    with pytest.raises(ValueError, match="in training mode"):
        CompiledStep(language_model("gateloop").train(), 31)
    hooked = language_model("gateloop")
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(
        ValueError, match=r"^model is a LanguageModel with a hook or another forward; expected one without"
    ):
        CompiledStep(hooked, 31)


@pytest.mark.parametrize("mixer", ["rotary-attention", "relative-attention"])
def test_a_prepared_model_runs_under_a_callers_autocast(mixer):
    model = language_model(mixer, n_heads=2)
    prepared, tokens = prepare(model), torch.randint(31, (2, 5))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, found = model(tokens)[0], prepared(tokens)[0]
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=0.05)
