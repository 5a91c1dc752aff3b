"""RWKV-7 against its equations step by step; what a model passes from its first layer to the others."""

import math

import pytest
import torch
from tests.mixers.stepwise import require_same
from torch.nn import functional

from recurra.mixers.rwkv4_channel_mixing import RWKV4ChannelMixingState
from recurra.mixers.rwkv7 import RWKV7, RWKV7State
from recurra.mixers.rwkv7_channel_mixing import RWKV7ChannelMixing
from recurra.models.language_model import LanguageModel, LanguageModelConfig

D_MODEL = 6


def make(**options):
    """A layer in float64 in which every weight matters."""
    layer = RWKV7(D_MODEL, **{"decay_rank": 2, "rate_rank": 3, "value_rank": 2, "gate_rank": 4, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def low_rank(layer, name, x, function=lambda x: x):
    first, _, second = getattr(layer, f"{name}_projection")
    y = function(x @ first.weight.T) @ second.weight.T
    return y if second.bias is None else y + second.bias


def by_a_loop(layer, x, state):
    """The paper's layer, with the state as it has it: values by keys. What comes after d_model is v_first."""
    (s, before), outputs = (state.h.mT, state.x), []
    heads = layer.n_heads, -1
    for now in x.unbind(1):
        now, first = now.split([D_MODEL, layer.d_carried], -1)
        r, w, k, v, a, g = (now + mu * (before - now) for mu in layer.shift)
        w = torch.exp(-math.exp(-0.5) * torch.sigmoid(layer.decay_bias + low_rank(layer, "decay", w, torch.tanh)))
        a, g = torch.sigmoid(low_rank(layer, "rate", a)), low_rank(layer, "gate", g, torch.sigmoid)
        r, k, values = r @ layer.receptance.weight.T, k @ layer.key.weight.T, v @ layer.value.weight.T
        if layer.layer == 1:
            first = values
        if layer.layer == 2:
            values = values + (first - values) * torch.sigmoid(low_rank(layer, "value", v))
        removed = functional.normalize((k * layer.removal_scale).unflatten(-1, heads), dim=-1)
        k = k * (1 + (a - 1) * layer.rate_share)
        r, w, k, v, a = (y.unflatten(-1, heads)[..., None] for y in (r, w, k, values, a))
        removed = removed[..., None]
        s = s * w.mT - (s @ removed) @ (a * removed).mT + v @ k.mT
        y = functional.layer_norm((s @ r)[..., 0], r.shape[2:3], eps=layer.norm_epsilon).flatten(1)
        bonus = (r * k * layer.bonus[..., None]).sum(2) * v[..., 0]
        y = (y * layer.norm_weight + layer.norm_bias + bonus.flatten(1)) * g
        outputs.append(torch.cat([y @ layer.output_projection.weight.T, first], -1))
        before = now
    return torch.stack(outputs, 1), RWKV7State(s.mT, before)


@pytest.mark.parametrize("options", [{}, {"n_heads": 3}, {"n_heads": 2, "norm_epsilon": 0.1}], ids=str)
@pytest.mark.parametrize("layer", [None, 1, 2])
def test_outputs_state_and_gradients_are_the_papers(options, layer):
    mixer = make(layer=layer, **options)
    x = torch.randn(2, 11, D_MODEL * (1 if layer is None else 2), dtype=torch.float64)
    state = RWKV7State(*map(torch.randn_like, mixer.double().initial_state(2)))
    if layer == 1:  # zeros come in
        x = torch.cat([x[..., :D_MODEL], torch.zeros_like(x[..., D_MODEL:])], -1)
    require_same(mixer, by_a_loop, x, state, 1e-9)


def test_channel_mixing_is_the_papers():
    def by_a_loop(layer, x, state):
        before = torch.cat([state.x[:, None], x[:, :-1]], 1)
        k = (x + layer.shift * (before - x)) @ layer.key.weight.T
        return functional.relu(k) ** 2 @ layer.output_projection.weight.T, RWKV4ChannelMixingState(x[:, -1])

    layer, x = RWKV7ChannelMixing(D_MODEL, d_hidden=9).double(), torch.randn(2, 7, D_MODEL, dtype=torch.float64)
    require_same(layer, by_a_loop, x, RWKV4ChannelMixingState(torch.randn(2, D_MODEL, dtype=torch.float64)))


@pytest.mark.parametrize("mixers", [["rwkv7", "gru", "rwkv7"], ["rwkv7"] * 3, ["gru", "rwkv7"]], ids=str)
@pytest.mark.parametrize("d_channel_mixing", [0, 7])
def test_the_first_layers_values_reach_the_others_alone(mixers, d_channel_mixing):
    options = {"rwkv7": {"n_heads": 2}}
    config = LanguageModelConfig(5, None, len(mixers), D_MODEL, d_channel_mixing, mixers, options)
    model, seen, handed = LanguageModel(config).double(), [], []

    def listen(_, given, result):
        seen.append(given[0])
        handed.append(result[0])

    for block in model.blocks:
        block.mixer.register_forward_hook(listen)
    model(torch.randint(5, (2, 4)))
    numbers = [block.mixer.layer for block in model.blocks if isinstance(block.mixer, RWKV7)]
    if mixers.count("rwkv7") == 1:
        assert numbers == [None]
        assert model.d_carried == 0
        return
    assert numbers == list(range(1, len(numbers) + 1))
    of_rwkv7 = [number for number, name in enumerate(mixers) if name == "rwkv7"]
    assert not seen[0][..., D_MODEL:].any()
    assert handed[0][..., D_MODEL:].any()
    for number in of_rwkv7[1:]:
        assert torch.equal(seen[number][..., D_MODEL:], handed[0][..., D_MODEL:])
        assert torch.equal(handed[number][..., D_MODEL:], handed[0][..., D_MODEL:])
    assert [x.shape[-1] for x in seen] == [2 * D_MODEL if name == "rwkv7" else D_MODEL for name in mixers]


def test_a_key_of_zeros_removes_nothing_and_has_finite_gradients():
    layer = make()
    with torch.no_grad():
        layer.key.weight.zero_()
    x = torch.randn(1, 5, D_MODEL, dtype=torch.float64, requires_grad=True)
    y, state = layer(x)
    (y.sum() + state.h.sum()).backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
