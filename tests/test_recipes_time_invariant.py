"""The Memory Horizon recipes of the time-invariant mixers differ from the paper's in what belongs to the mixer."""

from pathlib import Path

import pytest
import torch
import yaml

from recurra.mixers.base import create_mixer
from recurra.train.optimizer import parameter_groups
from recurra.train.recipe import load_recipe

FOLDER = Path(__file__).resolve().parents[1] / "recipes" / "memory-horizon"
MIXERS = {  # name -> numbers of its state: those of GateLoop's 64 complex ones, but for S4D's own 32 for every channel
    "s4d": 64 * 32 * 2,
    "s5": 64 * 2,
    "lru": 64 * 2,
    "linear-rnn": 128,
}


def read(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def mixer_of(recipe):
    model = recipe["model"]
    return create_mixer(model["mixer"], model["d_model"], **model["mixer_options"])


@pytest.mark.parametrize("name", list(MIXERS))
def test_all_but_the_mixer_and_its_transition_is_data_controlled(name):
    recipe, reference = read(name), read("data-controlled")
    assert recipe["model"].pop("mixer") == name
    assert reference["model"].pop("mixer") == "gateloop"
    for one in (recipe, reference):
        one["model"].pop("mixer_options")
        for key in ("transition_learning_rate", "transition_weight_decay"):
            one["optimizer"].pop(key, None)
    assert recipe == reference


@pytest.mark.parametrize("name", list(MIXERS))
def test_it_trains_a_model_with_the_state_that_its_header_says(name):
    _, state = mixer_of(read(name))(torch.randn(1, 3, 64))
    numbers = state.h.numel() * (2 if state.h.is_complex() else 1)
    assert numbers == MIXERS[name]


def test_no_transition_of_a_state_space_model_decays():
    for name in ("s4d", "s5", "lru"):
        experiment = load_recipe(FOLDER / f"{name}.yaml")
        mixer = mixer_of(read(name))
        groups = {id(p): group for group in parameter_groups(mixer, experiment.optimizer) for p in group["params"]}
        for parameter in mixer.transition_parameters():
            assert groups[id(parameter)]["weight_decay"] == 0
            assert groups[id(parameter)]["lr"] == 0.001
