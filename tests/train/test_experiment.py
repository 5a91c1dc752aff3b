from dataclasses import replace

import numpy as np
import pytest

from recurra.data.memory_horizon import MemoryHorizonConfig
from recurra.data.text import TextConfig
from recurra.models.language_model import LanguageModelConfig
from recurra.train.config import TrainingConfig
from recurra.train.experiment import Experiment, _with_lists, require_resumable, require_same_model, to_plain
from recurra.train.task import experiment_name, experiment_names, find_experiment


def test_whole_numbers_of_numpy_become_pythons():
    assert [type(value) for value in _with_lists([np.int64(2), True, 0.5])] == [int, bool, float]


def test_the_corpora_of_a_mixture_may_move():
    def experiment(mixture):
        data = TextConfig(path=next(iter(mixture)), source="shards", sampling="windows", mixture=mixture)
        return Experiment(experiment="text", data=data)

    saved = to_plain(experiment({"/old/a": 3.0, "/old/b": 1.0}))
    require_resumable(saved, experiment({"/new/a": 3.0, "/new/b": 1.0}))
    for other in ({"/old/a": 3.0, "/old/b": 2.0}, {"/old/a": 3.0}):
        with pytest.raises(ValueError, match=r"not that of the checkpoint in data\.mixture\.1 \(was 1\.0, now"):
            require_resumable(saved, experiment(other))


@pytest.mark.parametrize("change", [{"seed": 7}, {"precision": "bf16-mixed"}, {"accumulate": 2}])
def test_what_would_be_ignored_or_change_the_experiment_may_not(change):
    experiment = Experiment(experiment="memory-horizon")
    with pytest.raises(ValueError, match=f"not that of the checkpoint in training.{next(iter(change))}"):
        require_resumable(to_plain(experiment), replace(experiment, training=TrainingConfig(**change)))


def test_a_model_is_compared_by_what_it_computes():
    experiment = Experiment(experiment="motions-timesformer")
    saved = to_plain(experiment)
    saved["init_from"] = saved["data"]["path"] = "elsewhere"
    require_same_model(saved, experiment, "config.yaml", "best.safetensors")
    saved["model"]["n_layer"] += 1
    with pytest.raises(
        ValueError, match=r"config.yaml is not .*best.safetensors in model.n_layer \(was \d+, now \d+\)"
    ):
        require_same_model(saved, experiment, "config.yaml", "best.safetensors")


def test_an_option_that_a_run_did_not_know_is_as_it_was():
    experiment = Experiment(experiment="memory-horizon")
    saved = to_plain(experiment)
    del saved["model"]["residual_init_scale"], saved["model"]["feed_forward_options"]
    require_resumable(saved, experiment)
    require_same_model(saved, experiment, "config.yaml", "best.safetensors")
    other = replace(experiment, model=replace(experiment.model, residual_init_scale=0.5))
    with pytest.raises(ValueError, match=r"in model.residual_init_scale \(was None, now 0.5\)"):
        require_resumable(saved, other)


def test_experiments_are_named_by_their_task_and_model():
    assert {"memory-horizon", "motions-crvit", "recall", "text", "text-crt", "video-pi-vit"} <= {*experiment_names()}
    for name in experiment_names():
        assert experiment_name(*find_experiment(name)) == name
    with pytest.raises(ValueError, match=r"experiment is 'text-lstm'; expected one of induction, memory-horizon"):
        Experiment(experiment="text-lstm")


def test_sections_of_another_experiment_are_refused():
    with pytest.raises(TypeError, match="data is a MemoryHorizonConfig; expected a TextConfig, for the exp"):
        Experiment(experiment="text", data=MemoryHorizonConfig())
    with pytest.raises(TypeError, match="model is a LanguageModelConfig; expected a RecurrentMemoryTransformerConfig"):
        Experiment(experiment="text-rmt", data=TextConfig(path="somewhere"), model=LanguageModelConfig())
