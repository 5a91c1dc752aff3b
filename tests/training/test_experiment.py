from dataclasses import MISSING, asdict, fields, replace

import pytest

from recurra.data import MemoryHorizonConfig, TextConfig
from recurra.models import LanguageModelConfig
from recurra.training import (
    EXPERIMENTS,
    Experiment,
    MemoryHorizonExperiment,
    ModelConfig,
    TextExperiment,
    TrainingConfig,
)
from recurra.training.experiment import RESUMABLE, require_resumable, to_plain
from recurra.training.recipe import _keys


def defaults(config: type) -> dict[str, object]:
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(config)
    }


def test_the_model_has_all_fields_of_a_language_model_but_the_datas_sizes():
    expected = defaults(LanguageModelConfig)
    del expected["vocab_size"], expected["output_size"]
    assert defaults(ModelConfig) == expected


def test_the_datas_sizes_reach_the_model():
    experiment = MemoryHorizonExperiment(data=MemoryHorizonConfig(n_samples=10, sequence_length=8, modulus=7))
    config = experiment.model.for_data(experiment.build_data())
    assert (config.vocab_size, config.output_size) == (6, 7)


@pytest.mark.parametrize(
    ("field", "value"), [("n_layer", 0), ("d_model", 0), ("d_channel_mixing", -1), ("dropout", 1.0)]
)
def test_impossible_model_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"^model\.{field} must be .*, got {value}"):
        ModelConfig(**{field: value})


def test_plain_data_holds_no_objects():
    plain = to_plain(TextExperiment(data=TextConfig(path="somewhere")))
    assert plain["experiment"] == "text"
    assert plain["optimizer"]["betas"] == [0.9, 0.98]
    assert plain["model"] == asdict(ModelConfig())


@pytest.mark.parametrize(
    "change", [{"epochs": 7}, {"max_steps": 3}, {"threads": 1}, {"save_every": 5}, {"keep_checkpoints": 9}]
)
def test_how_long_a_run_goes_on_may_change(change):
    experiment = MemoryHorizonExperiment()
    require_resumable(to_plain(experiment), replace(experiment, training=TrainingConfig(**change)))


@pytest.mark.parametrize("change", [{"seed": 7}, {"precision": "bf16-mixed"}, {"accumulate": 2}])
def test_what_would_be_ignored_or_change_the_experiment_may_not(change):
    experiment = MemoryHorizonExperiment()
    with pytest.raises(ValueError, match=f"changed: training.{next(iter(change))}"):
        require_resumable(to_plain(experiment), replace(experiment, training=TrainingConfig(**change)))


def test_resumable_keys_exist():
    assert {key for kind in EXPERIMENTS.values() for key in _keys(kind)} >= RESUMABLE


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_each_experiment_is_filed_under_its_own_name(name):
    kind: type[Experiment] = EXPERIMENTS[name]
    assert defaults(kind)["experiment"] == name
