"""A run as the commands read it: its experiment, its data or its tokenizer, and its model with the weights of a
checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from recurra.data import DataSet, TextConfig, TextEncoder
from recurra.training import (
    CheckpointFolder,
    DataSizes,
    Experiment,
    RunFolder,
    TextExperiment,
    load_recipe,
    load_weights,
    scored_weights,
)
from recurra.training.experiment import RESUMABLE, differences, to_plain


@dataclass
class Run:
    """A trained run."""

    folder: RunFolder
    experiment: Experiment
    data: DataSet
    model: nn.Module
    step: int
    """The step of the checkpoint that the weights are from."""
    changes: dict[str, Any]
    """What the overrides made another thing than what was trained, by key: a segment length, say, but not a path."""

    @property
    def name(self) -> str:
        """What tables and legends call it."""
        return self.folder.path.resolve().name


def open_run(path: str, *, checkpoint: str = "best", overrides: Sequence[str] = ()) -> Run:
    """Load a run.

    Args:
        path: the run's folder.
        checkpoint: best, last, previous or a file.
        overrides: values set over the run's config.yaml: for a corpus that has moved, or to see how the model does
            with other lengths (data.segment_length, model.mem_len) than it was trained with.

    Raises:
        FileNotFoundError: the folder holds no run.
        CheckpointError: the checkpoint cannot be used.
    """
    folder = RunFolder(path)
    folder.require_run()
    experiment = load_recipe(folder.config, overrides)
    file, saved = CheckpointFolder(folder.checkpoints).load(checkpoint)
    data = experiment.build_data()
    model = experiment.build_model(data)
    load_weights(model, scored_weights(saved), file)
    position: dict[str, Any] = saved["position"]
    return Run(folder, experiment, data, model.eval(), position["step"], run_changes(folder, overrides))


@dataclass
class TextRun:
    """A trained language model and its tokenizer, without the corpus."""

    model: nn.Module
    tokenizer: TextEncoder
    experiment: TextExperiment
    step: int
    """The step of the checkpoint that the weights are from."""


def open_text_run(path: str, *, checkpoint: str = "best", overrides: Sequence[str] = ()) -> TextRun:
    """Load a run over text without its corpus; arguments as `open_run`.

    A run whose folder has no tokenizer, as older ones have none, takes it from the corpus.

    Raises:
        FileNotFoundError: the folder holds no run, or neither a tokenizer nor is the corpus where it was.
        CheckpointError: the checkpoint cannot be used.
        ValueError: the run is not over text.
    """
    folder = RunFolder(path)
    folder.require_run()
    experiment = load_recipe(folder.config, overrides)
    if not isinstance(experiment, TextExperiment):
        raise ValueError(f"{path} is a run of {experiment.experiment}; expected one over text")
    file, saved = CheckpointFolder(folder.checkpoints).load(checkpoint)
    tokenizer = _tokenizer(folder, experiment.data)
    model = experiment.model.build(DataSizes(len(tokenizer), len(tokenizer), experiment.data.segment_length))
    load_weights(model, scored_weights(saved), file)
    return TextRun(model.eval(), tokenizer, experiment, saved["position"]["step"])


def _tokenizer(folder: RunFolder, config: TextConfig) -> TextEncoder:
    if folder.tokenizer.exists():
        return config.load_tokenizer(folder.tokenizer)
    try:
        return config.build().corpus.encoder
    except OSError as error:
        raise FileNotFoundError(
            f"{folder.path} has no {folder.tokenizer.name}, and its corpus cannot be read either ({error}); say where "
            "it is with --data.path FOLDER"
        ) from error


def run_changes(folder: RunFolder, overrides: Sequence[str]) -> dict[str, Any]:
    """What `overrides` make another thing than what was trained, by key; where a corpus lies is none."""
    trained, now = (to_plain(load_recipe(folder.config, words)) for words in ((), overrides))
    return {key: value for key, (_, value) in differences(trained, now).items() if key not in RESUMABLE}
