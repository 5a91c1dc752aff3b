"""Kernels write float32 into memory of float32, whatever type and device torch makes tensors of by default."""

import pytest
import torch

from recurra import create_mixer
from recurra.decoding.steps import CompiledStep, prepare
from recurra.layers.cross_entropy import cross_entropy
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.state import tensors


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def other_default(request):
    """A switch to another default type, which ends with the test."""
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


def trained(layer, x):
    x = x.clone().requires_grad_()
    y, state = layer(x)
    return [y, *tensors(state), *torch.autograd.grad(y.sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gru", "slstm", "gateloop", "rg-lru", "performer", "h3"])
def test_a_layer_computes_the_same(name, other_default):
    layer, x = create_mixer(name, 8), torch.randn(2, 7, 8)
    expected = trained(layer, x)
    other_default()
    for found, right in zip(trained(layer, x), expected):
        assert found.dtype == right.dtype
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cross_entropy_is_the_same(dtype, other_default):
    logits, targets = torch.randn(5, 70).to(dtype).requires_grad_(), torch.randint(70, (5,))
    expected = cross_entropy(logits, targets)
    gradient = torch.autograd.grad(expected.sum(), logits)[0]
    other_default()
    found = cross_entropy(logits, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], gradient)


@torch.no_grad()
def test_a_compiled_step_is_the_same(other_default):
    model = LanguageModel(LanguageModelConfig(11, None, 1, 8, 8)).eval()
    tokens = torch.randint(11, (2, 1))
    expected, state = model(tokens)
    other_default()
    step = prepare(model)
    assert isinstance(step, CompiledStep)
    y, after = step(tokens)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step(tokens, after)[0], model(tokens, state)[0], rtol=1e-4, atol=1e-5)
