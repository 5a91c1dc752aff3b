"""RWKV-4 against its equations without a stabiliser, step by step, and in its limits."""

import math

import pytest
import torch
from tests.mixers.stepwise import require_same
from torch import nn

from recurra.mixers.rwkv4 import RWKV4, RWKV4State
from recurra.mixers.rwkv4_channel_mixing import RWKV4ChannelMixing, RWKV4ChannelMixingState

D_MODEL = 6


def make(**options) -> RWKV4:
    """A layer in float64 with decays, bonus and shifts of all sizes."""
    layer = RWKV4(D_MODEL, **options).double()
    with torch.no_grad():
        layer.log_decay.normal_(0, 1)
        layer.bonus.normal_(0, 2)
        for mix in (layer.mix_key, layer.mix_value, layer.mix_receptance):
            mix.uniform_(0.1, 0.9)
        layer.key.weight.mul_(4)
    return layer


def any_state(layer: RWKV4, batch: int) -> RWKV4State:
    a, b, m, x = (torch.randn_like(part) for part in layer.initial_state(batch))
    return RWKV4State(a, b.abs() + 1, m, x)


def projected(layer: nn.Module, name: str, now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    mix = getattr(layer, f"mix_{name}")
    return (mix * now + (1 - mix) * before) @ getattr(layer, name).weight.T


def by_a_loop(layer: RWKV4, x: torch.Tensor, state: RWKV4State):
    """The recurrence as it stands: a and b themselves, which float64 can hold. Only the state is scaled."""
    a, b, m, before = (part.detach() if name == "m" else part for name, part in zip(state._fields, state))
    a, b = a * m.exp(), b * m.exp()
    w, outputs = layer.log_decay.exp(), []
    for now in x.unbind(1):
        k, v, r = (projected(layer, name, now, before) for name in ("key", "value", "receptance"))
        own = torch.exp(layer.bonus + k)
        outputs.append((torch.sigmoid(r) * (a + own * v) / (b + own)) @ layer.output_projection.weight.T)
        a, b = torch.exp(-w) * a + torch.exp(k) * v, torch.exp(-w) * b + torch.exp(k)
        m, before = torch.maximum(m - w, k).detach(), now
    return torch.stack(outputs, 1), RWKV4State(a * torch.exp(-m), b * torch.exp(-m), m, before)


@pytest.mark.parametrize("options", [{}, {"d_wkv": 4}, {"d_wkv": 1}], ids=str)
def test_outputs_state_and_gradients_are_the_papers(options):
    layer = make(**options)
    x = torch.randn(2, 11, D_MODEL, dtype=torch.float64)
    require_same(layer, by_a_loop, x, any_state(layer, 2), 1e-10, constant=("m",))


@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_keys_beyond_exp_in_float32(shift):
    """exp(200) is infinite in float32 and exp(-200) is 0, and a common factor of all weights cancels."""
    layer, x = make().float(), torch.randn(1, 12, D_MODEL)
    with torch.no_grad():
        layer.mix_key.fill_(1.0)
        layer.key.weight[:, 0] = shift
        x[..., 0] = 1.0
        y, state = layer(x)
        again, _ = layer(x, state)
        layer.key.weight[:, 0] = 0.0
        expected, other = layer(x)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(again, layer(x, other)[0], rtol=1e-4, atol=1e-4)


def test_fast_decays_over_many_steps_stay_finite_in_float32():
    """100,000 steps at w = 50: running sums of 5,000,000, whose float32 neighbours are half a unit apart."""
    layer, x = RWKV4(3), torch.randn(1, 100_000, 3)
    with torch.no_grad():
        layer.log_decay.fill_(math.log(50.0))
        y, state = layer(x)
        expected, last = layer.double()(x.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-4)
    for one, other in zip(state, last):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_it_starts_as_the_first_published_layer():
    layer = RWKV4(4, d_wkv=3)
    torch.testing.assert_close(layer.log_decay, torch.tensor([-5.0, -5 + 8 * 0.5**0.7, 3.0]))
    torch.testing.assert_close(layer.bonus - math.log(0.3), torch.tensor([0.0, 0.5, -0.5]))
    torch.testing.assert_close(layer.mix_key, torch.tensor([0.0, 0.25, 0.5, 0.75]))
    torch.testing.assert_close(layer.mix_receptance, layer.mix_value.sqrt())


def channels_by_a_loop(layer: RWKV4ChannelMixing, x: torch.Tensor, state: RWKV4ChannelMixingState):
    before, outputs = state.x, []
    for now in x.unbind(1):
        k, r = projected(layer, "key", now, before), projected(layer, "receptance", now, before)
        outputs.append(torch.sigmoid(r) * (k.clamp(min=0) ** 2 @ layer.value.weight.T))
        before = now
    return torch.stack(outputs, 1), RWKV4ChannelMixingState(before)


@pytest.mark.parametrize("options", [{}, {"d_hidden": 5}], ids=str)
def test_channel_mixing_is_the_papers(options):
    layer = RWKV4ChannelMixing(D_MODEL, **options).double()
    state = RWKV4ChannelMixingState(torch.randn(2, D_MODEL, dtype=torch.float64))
    require_same(layer, channels_by_a_loop, torch.randn(2, 7, D_MODEL, dtype=torch.float64), state, 1e-12)
    assert layer.key.out_features == options.get("d_hidden", 4 * D_MODEL)
