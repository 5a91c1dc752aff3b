"""Every recipe can be read and built, and those of published experiments say what the papers' tables say."""

from pathlib import Path

import pytest
import torch
import yaml

from recurra.data import BatchSource, Split
from recurra.models import LanguageModel
from recurra.training import (
    Experiment,
    MemoryHorizonExperiment,
    ScheduleConfig,
    TextExperiment,
    load_recipe,
    parameter_groups,
)

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = sorted(FOLDER.glob("*/*.yaml"))


class Sizes:
    """A data set without data."""

    def __init__(self, vocab_size: int, output_size: int) -> None:
        self.vocab_size, self.output_size = vocab_size, output_size

    def source(self, split: Split) -> BatchSource:
        raise NotImplementedError


def build(experiment: Experiment) -> LanguageModel:
    """The experiment's model, without memory for its weights and without its corpus."""
    if isinstance(experiment, TextExperiment):
        n_words = experiment.data.bpe_vocab_size or 10_000
        sizes = Sizes(n_words, n_words)
    else:
        sizes = Sizes(experiment.data.largest_number + 2, experiment.data.modulus)
    with torch.device("meta"):
        return LanguageModel(experiment.model.for_data(sizes))


def n_parameters(model: LanguageModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_all_recipes_are_found():
    assert {path.relative_to(FOLDER).as_posix() for path in RECIPES} >= {
        "demo/data-controlled.yaml",
        "demo/fixed.yaml",
        "memory-horizon/data-controlled.yaml",
        "memory-horizon/fixed.yaml",
        "ptb/gateloop.yaml",
        "wikitext-103/gateloop.yaml",
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_a_recipe_makes_a_model_and_groups_for_all_its_parameters(path):
    experiment = load_recipe(path)
    model = build(experiment)
    groups = parameter_groups(model, experiment.optimizer)
    assert sum(parameter.numel() for group in groups for parameter in group["params"]) == n_parameters(model)
    header = path.read_text().split("experiment:")[0]
    assert header.startswith("# ")


@pytest.mark.parametrize(("name", "transition"), [("data-controlled", "data"), ("fixed", "fixed")])
def test_memory_horizon_is_table_2_and_table_3(name, transition):
    experiment = load_recipe(FOLDER / "memory-horizon" / f"{name}.yaml")
    assert isinstance(experiment, MemoryHorizonExperiment)
    data, model, optimizer, training = (
        experiment.data,
        experiment.model,
        experiment.optimizer,
        experiment.training,
    )
    # Table 2
    assert (data.largest_number, data.sequence_length, data.resets_per_sample) == (4, 1024, 3)
    assert (data.modulus, data.n_samples) == (51, 2000)
    # Table 3
    assert training.epochs == 300
    assert data.batch_size * training.accumulate == 32
    assert training.max_steps is None
    assert optimizer.learning_rate == 0.0025
    assert optimizer.betas == (0.9, 0.98)
    assert optimizer.weight_decay == 0.05
    assert (optimizer.transition_learning_rate, optimizer.transition_weight_decay) == (None, None)
    assert experiment.schedule == ScheduleConfig(warmup_steps=10_000, final_fraction=0.0)
    assert (model.n_layer, model.d_channel_mixing, model.d_model) == (4, 128, 64)
    assert model.mixer == "gateloop"
    assert model.mixer_options == {
        "d_qk": 64,
        "d_v": 64,
        "n_heads": 64,
        "transition": transition,
        "magnitude_activation": "sigmoid",
        "phase_activation": "identity",
    }


def test_wikitext_103_is_table_4():
    experiment = load_recipe(FOLDER / "wikitext-103" / "gateloop.yaml")
    assert isinstance(experiment, TextExperiment)
    data, model, optimizer, training = (
        experiment.data,
        experiment.model,
        experiment.optimizer,
        experiment.training,
    )
    assert training.epochs == 100
    assert data.batch_size * training.accumulate == 16
    assert training.max_steps is None
    assert optimizer.learning_rate == 0.000125
    assert optimizer.transition_learning_rate == 0.0001
    assert optimizer.transition_weight_decay == 0.0
    assert optimizer.betas == (0.9, 0.98)
    assert optimizer.weight_decay == 0.25
    assert experiment.schedule == ScheduleConfig(warmup_steps=5000, final_fraction=0.0)
    assert (model.n_layer, model.d_channel_mixing, model.d_model) == (12, 1872, 624)
    assert model.mixer_options == {
        "d_qk": 624,
        "d_v": 624,
        "n_heads": 624,
        "transition": "data",
        "magnitude_activation": "sigmoid",
        "phase_activation": "identity",
    }
    assert (data.vocabulary, data.bpe_vocab_size) == ("bpe", 50_257)


def test_wikitext_103_has_about_as_many_parameters_as_published():
    model = build(load_recipe(FOLDER / "wikitext-103" / "gateloop.yaml"))
    assert n_parameters(model) == pytest.approx(125e6, rel=0.06)


@pytest.mark.parametrize("folder", ["memory-horizon", "demo"])
def test_the_two_variants_differ_in_the_transition_alone(folder):
    one, other = (
        yaml.safe_load((FOLDER / folder / f"{name}.yaml").read_text()) for name in ("data-controlled", "fixed")
    )
    assert one["model"]["mixer_options"].pop("transition") == "data"
    assert other["model"]["mixer_options"].pop("transition") == "fixed"
    assert one == other
