"""Initial transitions: on the given ring, in a layer and in a model that re-initialises its weights."""

import math

import pytest
import torch
from torch import nn

from recurra.layers.transition import _MAGNITUDE_ACTIVATIONS, _TRANSITIONS, _Ring
from recurra.mixers.base import create_mixer
from recurra.models.language_model import LanguageModel, LanguageModelConfig

RING = {"r_min": 0.7, "r_max": 0.95, "max_phase": 2.0, "input_share": 0.25}


def start(transition, magnitude):
    return _TRANSITIONS[transition](8, 500, _MAGNITUDE_ACTIVATIONS[magnitude], _Ring(**RING), 1.0).double()


@pytest.mark.parametrize("magnitude", _MAGNITUDE_ACTIVATIONS)
@pytest.mark.parametrize("transition", _TRANSITIONS)
def test_magnitudes_and_phases_at_the_start(transition, magnitude):
    r, phase = (values[0, 0] for values in start(transition, magnitude)(torch.zeros(1, 1, 8, dtype=torch.float64)))
    assert 0.7 <= r.min() < 0.71
    assert 0.94 < r.max() <= 0.95 + 1e-6
    # uniform in area: half of the channels are beyond the circle that halves the ring
    assert abs((r > math.sqrt((0.7**2 + 0.95**2) / 2)).double().mean() - 0.5) < 0.1
    torch.testing.assert_close(phase, torch.linspace(0, 2, 500, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transition", _TRANSITIONS)
def test_a_phase_scale_leaves_the_start_and_scales_what_an_update_moves(transition):
    """The same values at the start, whatever the scale; steps of one size in theta are that much smaller in phase."""
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    layers = []
    for scale in (1.0, 0.04):
        torch.manual_seed(0)
        options = (_MAGNITUDE_ACTIVATIONS["sigmoid"], _Ring(**RING), scale)
        layers.append(_TRANSITIONS[transition](8, 50, *options).double())
    starts = [[part.detach().clone() for part in layer(x)] for layer in layers]  # a fixed phase is the parameter itself
    for plain, scaled in zip(*starts):
        torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        for layer in layers:
            theta = layer.projection.bias[50:] if transition == "data" else layer.theta
            theta += 0.5
    moves = [layer(x)[1] - phase for layer, (_, phase) in zip(layers, starts)]
    torch.testing.assert_close(moves[0], torch.full_like(moves[0], 0.5))
    torch.testing.assert_close(moves[1], torch.full_like(moves[1], 0.02))


@pytest.mark.parametrize("mixer", ["gateloop", "gateloop-attention"])
@pytest.mark.parametrize("transition", _TRANSITIONS)
def test_a_model_that_reinitialises_its_weights_stays_on_the_ring(mixer, transition):
    options = {"transition": transition, "ring": RING}
    model = LanguageModel(LanguageModelConfig(11, None, 2, 64, 12, mixer=mixer, mixer_options=options))
    for block in model.blocks:
        r, phase = block.mixer.transition(torch.zeros(1, 1, 64))
        assert r.min() >= 0.7 - 1e-6
        assert r.max() <= 0.95 + 1e-6
        assert abs(phase.max() - 2.0) < 1e-5
        if transition == "data":
            torch.testing.assert_close(
                block.mixer.transition.projection.weight.std().item(), 0.25 / 8, rtol=0.1, atol=0
            )


def test_a_phase_shift_moves_all_phases_of_a_layer_by_less_than_a_step():
    ring = _Ring(max_phase=3.0, phase_shift=1.0)
    shifts = []
    for seed in range(5):
        torch.manual_seed(seed)
        _, phase = ring.draw(4)
        moved = phase - torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
        torch.testing.assert_close(moved, moved[:1].expand(4))
        shifts.append(float(moved[0]))
    assert all(0 <= shift < 1 for shift in shifts)
    assert len(set(shifts)) == 5
    assert float(ring.draw(1)[1]) == 0  # one phase alone has no step


@pytest.mark.parametrize(
    ("ring", "message"),
    [
        ({"r_min": 0.0}, r"ring\.r_min is 0.0; expected a number above 0 and below 1"),
        ({"r_max": 1.0}, r"ring\.r_max is 1.0; expected at least r_min = 0.9 and below 1"),
        ({"r_min": 0.9, "r_max": 0.8}, r"ring\.r_max is 0.8; expected at least r_min = 0.9"),
        ({"max_phase": -1.0}, r"ring\.max_phase is -1.0; expected a finite number of at least 0"),
        ({"input_share": math.nan}, r"ring\.input_share is nan"),
        ({"radius": 1.0}, "an entry of ring is 'radius'; expected one of r_min, r_max"),
        ({"phase_shift": -0.5}, r"ring\.phase_shift is -0.5; expected a finite number of at least 0"),
    ],
)
def test_impossible_rings_are_refused(ring, message):
    with pytest.raises(ValueError, match=message):
        create_mixer("gateloop", 8, ring=ring)


@pytest.mark.parametrize(
    ("ring", "message"),
    [
        ({"r_min": None}, r"ring\.r_min is None, None; expected a number"),
        ({"r_max": "0.9"}, r"ring\.r_max is '0.9', a str; expected a number"),
        (3, "ring is 3, an int; expected entries with values"),
    ],
)
def test_rings_of_a_wrong_type_are_refused(unchecked, ring, message):
    with pytest.raises(TypeError, match=message):
        create_mixer("gateloop", 8, ring=ring)


@pytest.mark.filterwarnings("ignore:.*(deprecated|migrat|quantize_per)")
def test_a_model_that_torch_quantised_still_runs():
    """`weight` and `bias` are methods of the layers that torch puts in the place of `nn.Linear`."""
    model = LanguageModel(LanguageModelConfig(vocab_size=11, d_model=8, n_layer=1, mixer="gateloop"))
    tokens = torch.randint(11, (2, 9))
    expected, _ = model(tokens)
    found, _ = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})(tokens)
    assert (found - expected).norm() <= 0.1 * expected.norm()
