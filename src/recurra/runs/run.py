"""A trained run as one object that loads what it is asked for."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from recurra.data import DataSet, TextEncoder
from recurra.models import DataSizes, VideoSizes
from recurra.runs.score_files import read_scores, score_file
from recurra.training import CheckpointFolder, Experiment, RunFolder, Task, load_recipe, load_weights, scored_weights
from recurra.training.experiment import RESUMABLE, differences, require_same_model, to_plain

_VOCABULARY = frozenset({"data.tokenizer", "data.bpe_vocab_size"})  # where a vocabulary is from: a run has its own


def open_run(path: str | Path, *, checkpoint: str = "best", overrides: Sequence[str] = ()) -> "Run":
    """Open a trained run. Its model, tokenizer, data and scores are loaded when they are first used.

    Args:
        path: the run's folder, as `recurra train` or `recurra convert` wrote it.
        checkpoint: "best", "last", "previous" or the path of a checkpoint file.
        overrides: values set over the run's config.yaml, as words of a command line: ["--data.path", "corpus"] for a
            corpus that has moved, ["--data.segment_length=17"] to evaluate with another length than in training.

    Raises:
        FileNotFoundError: the folder does not contain a run.
        RecipeError: an override names an unknown key or an impossible value.
    """
    folder = RunFolder(path)
    folder.require_run()
    return Run(folder, load_recipe(folder.config, overrides), checkpoint=checkpoint, overrides=overrides)


class Run:
    """A trained run. `open_run` makes it; everything but `folder` and `experiment` is loaded on first use.

    A text run therefore generates without its corpus, and a video run classifies without its videos: only `data`
    needs them.

    folder: where the run's files are. experiment: its configuration, the overrides included. checkpoint: the one that
    `model` and `step` are from.
    """

    def __init__(
        self, folder: RunFolder, experiment: Experiment, *, checkpoint: str = "best", overrides: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.experiment = experiment
        self.checkpoint = checkpoint
        self._overrides = tuple(overrides)

    def __repr__(self) -> str:
        kind, where = self.experiment.experiment, str(self.folder.path)
        return f"Run({where!r}, experiment={kind!r}, checkpoint={self.checkpoint!r})"

    @property
    def name(self) -> str:
        """The folder's name, which tables and legends show."""
        return self.folder.path.resolve().name

    @property
    def model(self) -> nn.Module:
        """The model with the checkpoint's weights (the averaged ones, if it has them), on the CPU, in evaluation mode.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or of another model.
            ValueError: config.yaml describes another model than the checkpoint is from.
        """
        return self._loaded[0]

    @property
    def step(self) -> int:
        """The training step of the checkpoint. Raises as `model`."""
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> tuple[nn.Module, int]:
        file, saved = CheckpointFolder(self.folder.checkpoints).load(self.checkpoint)
        model = self.experiment.model.build(self.sizes())
        load_weights(model, scored_weights(saved), file)
        # weights that fit are not enough: an activation has none
        require_same_model(saved["config"], self._trained, str(self.folder.config), str(file))
        return model.eval(), int(saved["position"]["step"])

    @property
    def task(self) -> Task:
        """The kind of its data."""
        return self.experiment.task

    def sizes(self) -> DataSizes | VideoSizes:
        """What the model takes from its data, found without the data wherever the run's folder says it."""
        return self.task.sizes_of_run(self)

    @cached_property
    def tokenizer(self) -> TextEncoder:
        """The tokenizer of a text run: from its folder, or from the corpus for older runs, which did not save it.

        Raises:
            ValueError: the run is not over text.
            FileNotFoundError: the folder has no tokenizer, and the corpus cannot be read either.
        """
        encoder: TextEncoder = self.task.tokenizer(self)
        return encoder

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes of a video run: from its folder, or from the videos if it has none.

        Raises:
            ValueError: the run is not over videos.
            OSError: the folder has no classes.txt, and the videos are not there either.
        """
        return self.task.class_names(self)

    @cached_property
    def data(self) -> DataSet:
        """The data set, opened or generated; a text is read with the run's own vocabulary.

        Raises:
            OSError: it is not where the configuration says.
            ValueError: it cannot be read, `data.tokenizer` is another vocabulary than the run's, or the videos have
                other classes.
        """
        return self.task.open_data(self.experiment.data, self.folder)

    @cached_property
    def scores(self) -> dict[str, dict[str, Any]]:
        """What `recurra eval` wrote into the folder, by split: `run.scores["test"]["perplexity"]`.

        Scores that were measured with overrides have these in their name, as in "test-segment_length-17".

        Raises:
            ValueError: a file of scores is damaged.
        """
        return read_scores(self.folder)

    def score_file(self, split: str) -> Path:
        """Where the scores of a split lie that were measured with the same overrides."""
        return score_file(self.folder, split, self.changes)

    @cached_property
    def changes(self) -> dict[str, Any]:
        """The overrides that make this another experiment than was trained, by key: a length, but not a path."""
        unlike = differences(to_plain(self._trained), to_plain(self.experiment))
        return {key: value for key, (_, value) in unlike.items() if key not in RESUMABLE | _VOCABULARY}

    @cached_property
    def _trained(self) -> Experiment:
        """The experiment in the run's config.yaml, without the overrides."""
        return load_recipe(self.folder.config) if self._overrides else self.experiment
