"""Outlined models: the shapes of the models themselves, on meta, and nothing drawn; and models to be filled."""

import pytest
import torch
import torch.utils._device
from torch import nn

from recurra.mixers.base import list_mixers
from recurra.models.language_model import LanguageModel, LanguageModelConfig
from recurra.models.registry import Undrawn, on_meta
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig

SIZES = {"vocab_size": 10, "n_layer": 2, "d_model": 8, "d_channel_mixing": 8}


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (LanguageModel, LanguageModelConfig(**SIZES, mixer="gateloop")),
        (TransformerXL, TransformerXLConfig(**SIZES, n_heads=2, segment_length=4)),
    ],
)
def test_an_outline_has_the_shapes_and_no_values(model, config):
    expected = model(config).state_dict()
    with on_meta():
        outline = model(config)
    found = outline.state_dict()
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
        name: (x.shape, x.dtype) for name, x in expected.items()
    }
    assert all(x.is_meta for x in found.values())
    assert [name for name, _ in outline.named_parameters()] == [name for name, _ in model(config).named_parameters()]


def test_nothing_is_drawn_on_meta_and_all_elsewhere():
    drawn = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            drawn.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    with Counting(), on_meta():
        layer = nn.Linear(3, 2)
        nn.init.xavier_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
        x = nn.init.ones_(torch.empty(3, device="cpu")).mul(2)
    assert layer.weight.is_meta
    assert x.tolist() == [2, 2, 2]
    assert set(drawn) == {"empty", "fill_", "mul"}


@pytest.mark.parametrize("mixer", list_mixers())
def test_every_mixer_has_an_outline_though_torch_does_not_know_linspace(monkeypatch, mixer):
    """As after transformers has loaded a model before anything else used torch.device as a context."""
    without = torch.utils._device._device_constructors() - {torch.linspace}
    monkeypatch.setattr(torch.utils._device, "_device_constructors", lambda: without)
    config = LanguageModelConfig(**SIZES | {"d_model": 48}, mixer=mixer)
    with on_meta():
        outline = LanguageModel(config)
    assert all(parameter.is_meta for parameter in outline.parameters())


@pytest.mark.parametrize("mixer", list_mixers())
def test_a_model_filled_after_nothing_was_drawn_is_the_model(mixer):
    config = LanguageModelConfig(**SIZES | {"d_model": 48}, mixer=mixer)
    model = LanguageModel(config).eval()
    with Undrawn():
        filled = LanguageModel(config).eval()
        for parameter in filled.parameters():  # what memory may hold
            parameter.data = torch.full_like(parameter, torch.nan)
    filled.load_state_dict(model.state_dict())
    tokens = torch.arange(10)[None]
    assert torch.equal(filled(tokens)[0], model(tokens)[0])


def test_uninitialised_layers_draw_nothing():
    before = torch.get_rng_state()
    with Undrawn():
        layer = nn.Linear(3, 2)
        with torch.no_grad():
            layer.weight[:1].normal_()
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(torch.empty(9).uniform_().tolist())) == 9
