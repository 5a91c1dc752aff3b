"""Weights, workspaces and recordings are in the CPU's memory, whatever device torch makes tensors on by default."""

import pytest
import torch
from torch import nn

from recurra.decoding.linear import DTYPES, DecodingLinear
from recurra.decoding.steps import CompiledStep, prepare
from recurra.models.language_model import LanguageModel, LanguageModelConfig


@pytest.fixture
def elsewhere():
    """A default device whose memory no kernel can write."""
    return torch.device("meta")


@pytest.mark.parametrize("numbers", DTYPES)
def test_a_linear_layer_is_the_same(numbers, elsewhere):
    layer, x = nn.Linear(40, 70, bias=False), torch.randn(3, 40)
    expected = DecodingLinear(layer, numbers)(x)
    with elsewhere:
        assert DecodingLinear(layer, numbers)(x).equal(expected)


@torch.no_grad()
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_step_is_the_same(weights, elsewhere):
    model = LanguageModel(LanguageModelConfig(11, None, 1, 8, 8)).eval()
    tokens = torch.randint(11, (2, 1))

    def steps():
        prepared = prepare(model, weights)
        step = CompiledStep(prepared.model, 11)
        assert step.program(2) is not None
        y, state = step(tokens)
        return [y, step(tokens, state)[0]]

    expected = steps()
    with elsewhere:
        found = steps()
    for one, other in zip(found, expected, strict=True):
        assert one.equal(other)
