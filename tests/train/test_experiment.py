from dataclasses import replace

import pytest

from recurra.data.memory_horizon import MemoryHorizonConfig
from recurra.data.text import TextConfig
from recurra.models.language_model import LanguageModelConfig
from recurra.models.recurrent_memory_transformer import RecurrentMemoryTransformerConfig
from recurra.models.transformer_xl import TransformerXL, TransformerXLConfig
from recurra.train.config import TrainingConfig
from recurra.train.experiment import Experiment, differences, require_resumable, require_same_model, to_plain
from recurra.train.task import experiment_name, experiment_names, find_experiment

SMALL = {"n_layer": 1, "d_model": 8, "n_heads": 2, "d_channel_mixing": 8}


def segmented(kind: str, config: type, length: int, **options):
    """The model of an experiment over text in segments."""
    data = TextConfig(path="somewhere", segment_length=length)
    experiment = Experiment(experiment=kind, data=data, model=config(**SMALL, **options))

    class Sizes:
        vocab_size = output_size = 13

        def source(self, split):
            raise NotImplementedError

    return experiment.build_model(Sizes())


@pytest.mark.parametrize(("mem_len", "expected"), [(None, 5), (0, 0), (3, 3)])
def test_a_memory_without_a_length_is_a_segment_long(mem_len, expected):
    model = segmented("text-transformer-xl", TransformerXLConfig, 5, mem_len=mem_len)
    assert type(model) is TransformerXL
    assert (model.config.segment_length, model.config.mem_len) == (5, expected)


@pytest.mark.parametrize("cutoffs", [[3, 2], [13], [0, 5]])
def test_cutoffs_that_do_not_fit_the_datas_vocabulary_are_refused(cutoffs):
    with pytest.raises(ValueError, match=r"cutoffs is .* expected increasing numbers from 1 to 12"):
        segmented("text-transformer-xl", TransformerXLConfig, 5, cutoffs=cutoffs)


def test_differences_name_keys_and_both_values():
    one = {"a": {"b": 1, "c": [2]}, "d": 3}
    other = {"a": {"b": 5, "c": [2]}, "e": 4}
    assert differences(one, other) == {"a.b": (1, 5), "d": (3, None), "e": (None, 4)}


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


def test_experiments_are_named_by_their_task_and_model():
    assert experiment_names() == [
        "induction",
        "memory-horizon",
        "motions-crvit",
        "motions-timesformer",
        "recall",
        "state-tracking",
        "text",
        "text-block-recurrent-transformer",
        "text-crt",
        "text-rmt",
        "text-transformer-xl",
        "video-crvit",
        "video-pi-vit",
        "video-timesformer",
    ]
    for name in experiment_names():
        assert experiment_name(*find_experiment(name)) == name
    with pytest.raises(ValueError, match=r"experiment is 'text-lstm'; expected one of induction, memory-horizon"):
        Experiment(experiment="text-lstm")


def test_sections_of_another_experiment_are_refused():
    with pytest.raises(TypeError, match="data is a MemoryHorizonConfig; expected a TextConfig, for the exp"):
        Experiment(experiment="text", data=MemoryHorizonConfig())
    with pytest.raises(TypeError, match="model is a LanguageModelConfig; expected a RecurrentMemoryTransformerConfig"):
        Experiment(experiment="text-rmt", data=TextConfig(path="somewhere"), model=LanguageModelConfig())


def test_a_missing_model_has_its_defaults_and_missing_data_too_if_they_can():
    experiment = Experiment(experiment="text-rmt", data=TextConfig(path="somewhere"))
    assert experiment.model == RecurrentMemoryTransformerConfig()
    assert experiment != Experiment(experiment="text-crt", data=TextConfig(path="somewhere"))
    model = segmented("text-rmt", RecurrentMemoryTransformerConfig, 5, n_memory=3)
    assert (model.config.vocab_size, model.config.segment_length, model.config.n_memory) == (13, 5, 3)
    with pytest.raises(TypeError, match="path"):
        Experiment(experiment="text-rmt")
