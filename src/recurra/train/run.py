"""Runs: start, resume and score them, or open one as an object that loads its parts on first use."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn

from recurra._choices import Split
from recurra._files.reading import read_json
from recurra._files.writing import write_json
from recurra._process import is_first_launched
from recurra.checks import sentence
from recurra.convert.portable import with_weights
from recurra.data.batches import DataSet
from recurra.models.registry import DataSizes, VideoSizes, on_meta
from recurra.streams.continuation import TextEncoder
from recurra.train._ranks import Ranks
from recurra.train.checkpoint import CheckpointFolder, load_weights, require_fitting, scored_weights
from recurra.train.evaluate import evaluate
from recurra.train.experiment import (
    RESUMABLE,
    Experiment,
    differences,
    require_resumable,
    require_same_model,
    to_plain,
)
from recurra.train.loop import Trainer
from recurra.train.recipe import find_recipe, load_recipe, mixer_of_recipe, split_variant, to_yaml
from recurra.train.run_folder import RunFolder
from recurra.train.shipped import find_run
from recurra.train.task import Task

__all__ = ["Run", "open_run"]


_VOCABULARY = frozenset({"data.tokenizer", "data.bpe_vocab_size"})  # where a vocabulary is from: a run has its own


def open_run(path: str | Path, *, checkpoint: str = "best", overrides: Sequence[str] = ()) -> "Run":
    """Open a trained run. Its model, tokenizer, data and scores are loaded on first use.

    Args:
        path: the run's folder, as written by `recurra train` or `recurra convert`; its name in runs/; or the name of a
            model in the package (`recurra models` lists them).
        checkpoint: "best", "last", "previous" or the path of a checkpoint file.
        overrides: values that override the run's config.yaml, as command-line words: ["--data.path", "corpus"] for a
            corpus that has moved, ["--data.segment_length=17"] to evaluate with a different length than in training.

    Raises:
        FileNotFoundError: there is no such run.
        RecipeError: an override names an unknown key or an impossible value.
    """
    folder = RunFolder(find_run(path))
    return Run(folder, load_recipe(folder.config, overrides), checkpoint=checkpoint, overrides=overrides)


class Run:
    """A trained run, from `open_run`; everything except `folder` and `experiment` is loaded on first use.

    A text run therefore generates without its corpus, and a video run classifies without its videos.

    folder: where its files are. experiment: its configuration, with the overrides. checkpoint: of `model` and `step`.
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
        """The folder's name, as shown in tables and legends."""
        return self.folder.path.resolve().name

    @property
    def model(self) -> nn.Module:
        """The model with the checkpoint's weights (averaged ones if it has them; adapters are merged), on the CPU, in
        evaluation mode."""
        return self._loaded[0]

    @property
    def step(self) -> int:
        """The training step of the checkpoint. Raises as `model`."""
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> tuple[nn.Module, int]:
        file, saved = CheckpointFolder(self.folder.checkpoints).load(self.checkpoint, scored_only=True)
        build, weights, adapters = partial(self.experiment.model.build, self.sizes()), scored_weights(saved), None
        if self.experiment.lora.rank is None:
            with on_meta():
                outline = build()
            require_fitting(outline, weights, file)
            model = with_weights(outline, weights, build)
        else:
            model = build()
            self.experiment.load_initial_weights(model)
            adapters = self.experiment.add_adapters(model)
            load_weights(model, weights, file)
        # weights that fit are not enough: an activation has none
        require_same_model(saved["config"], self._trained, str(self.folder.config), str(file))
        if adapters is not None:
            adapters.require_base(saved["base"], file)
            adapters.merge()
        return model.eval(), int(saved["position"]["step"])

    @property
    def task(self) -> Task:
        """The kind of its data."""
        return self.experiment.task

    def sizes(self) -> DataSizes | VideoSizes:
        """The sizes that the model takes from its data, read from the run's folder if possible."""
        return self.task.sizes_of_run(self)

    @cached_property
    def tokenizer(self) -> TextEncoder:
        """The tokenizer of a text run, from its folder."""
        encoder: TextEncoder = self.task.tokenizer(self)
        return encoder

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes of a video run: from its folder, or from the videos if it has none."""
        return self.task.class_names(self)

    @cached_property
    def data(self) -> DataSet:
        """The data set, opened or generated; text is read with the run's vocabulary."""
        return self.task.open_data(self.experiment.data, self.folder)

    @cached_property
    def scores(self) -> dict[str, dict[str, Any]]:
        """The scores written by `recurra eval`, by split and overrides:
        `run.scores["test-segment_length-17"]["perplexity"]`."""
        return read_scores(self.folder)

    def score_file(self, split: str) -> Path:
        """The file with the scores of a split, measured with the same overrides."""
        return _score_file(self.folder, split, self.changes)

    @cached_property
    def changes(self) -> dict[str, Any]:
        """The overrides that change the trained experiment, by key: a length, but not a path."""
        unlike = differences(to_plain(self._trained), to_plain(self.experiment))
        return {key: value for key, (_, value) in unlike.items() if key not in RESUMABLE | _VOCABULARY}

    @cached_property
    def _trained(self) -> Experiment:
        """The experiment in the run's config.yaml, without the overrides."""
        return load_recipe(self.folder.config) if self._overrides else self.experiment


# --- starting and resuming: a recipe or a run's folder in, a trainer out ---


def start_run(recipe: Path | str, folder: Path | str | None = None, overrides: Sequence[str] = ()) -> Trainer:
    """Prepare a new run of a recipe, FILE or FILE#VARIANT; `fit` trains it, and it is locked until that ends.

    folder: where to write; None is `default_run_folder`. overrides: as words of a command line.
    """
    experiment = load_recipe(recipe, overrides)
    run = RunFolder(folder or default_run_folder(str(recipe), getattr(experiment.model, "mixer", None)))
    run.require_new()
    trainer = Trainer(experiment, run, evaluate)
    trainer.begin()
    if trainer.ranks.is_first:
        with _kept_locked(run):
            run.require_new()  # another process may have begun in the meantime
            _describe(trainer)
    trainer.ranks.wait()
    return trainer


def resume_run(folder: Path | str, *, checkpoint: str = "last", overrides: Sequence[str] = ()) -> Trainer:
    """Prepare to continue a run from a checkpoint; `fit` trains it, and it is locked until that ends.

    folder: the run's folder, or its name in runs/. checkpoint: "last", "previous", "best" or the path of a file.
    overrides: values that override the run's config.yaml; only some can be changed.
    """
    run = RunFolder(find_run(folder))
    CheckpointFolder(run.checkpoints).require_trained(checkpoint)  # first: the data of such a run may be unknown

    def own_data(experiment: Experiment, ranks: Ranks) -> DataSet:
        return experiment.task.open_data(experiment.data, run, rank=ranks.data_rank, world_size=ranks.data_count)

    with _kept_locked(run) if is_first_launched() else nullcontext():
        experiment = load_recipe(run.config, overrides)
        if experiment.training.precision == "auto":  # what the run began with, also on another machine
            own = load_recipe(run.config).training.precision
            experiment = replace(experiment, training=replace(experiment.training, precision=own))
        trainer = Trainer(experiment, run, evaluate, open_data=own_data)
        trainer.resume(checkpoint)
        if trainer.position.step == 0:  # no checkpoint that has compared the settings with its own
            require_resumable(to_plain(load_recipe(run.config)), trainer.experiment)
        if trainer.ranks.is_first:
            _describe(trainer)
    trainer.ranks.wait()
    return trainer


def default_run_folder(recipe: str, mixer: str | list[str] | None = None) -> Path:
    """Name the folder of a recipe's run: runs/FOLDER-NAME for FOLDER/NAME.yaml, runs/FOLDER-VARIANT for a variant.

    If its `mixer`, one or a list, differs from the recipe's, its name follows: runs/FOLDER-NAME-MIXER.
    """
    path, variant = split_variant(recipe)
    if path.parent == Path() and not path.is_file():  # the folder of a recipe for the recipe
        path = find_recipe(path)
    names = [path.resolve().parent.name, variant or path.stem]
    if mixer is not None and mixer != mixer_of_recipe(recipe):
        names += [mixer] if isinstance(mixer, str) else mixer
    return Path("runs", "-".join(names))


@contextmanager
def _kept_locked(run: RunFolder) -> Iterator[None]:
    """Lock a run, and unlock it if the block fails; otherwise it stays locked until the end of `fit`."""
    run.lock()
    try:
        yield
    except BaseException:
        run.unlock()
        raise


def _describe(trainer: Trainer) -> None:
    """Write what a run is into its folder: its configuration and its tokenizer or classes."""
    task = trainer.experiment.task
    task.save_extras(trainer.data, trainer.folder)  # first: what has a configuration is a run
    trainer.folder.write_config(to_yaml(trainer.experiment))


# --- the scores of a run on a split, in RUN/eval-*.json: what `recurra eval` measures, prints and writes ---

_PREFIX = "eval-"
AGAIN = "score the run again, or remove the file"
DETAILS = ("class_accuracies", "confusion")
"""Scores that are saved and drawn, but too long to print."""


def score_run(run: Run, split: Split = "test", *, temperature: float | None = None) -> dict[str, Any]:
    """Score a run on a split, in the precision of its weights, with the state carried across contiguous segments.

    Videos are scored in all views.

    temperature: divides the logits; for token models.

    Returns:
        plain data: the split, the checkpoint and its step, the overrides that changed the experiment, the lengths used,
        and the scores.
    """
    measured = run.task.score(run, split, temperature)
    return {
        "split": split,
        "checkpoint": run.checkpoint,
        "step": run.step,
        "changes": run.changes | ({} if temperature is None else {"temperature": temperature}),
        **run.task.lengths(run.experiment),
        **measured,
    }


def _score_file(folder: RunFolder, split: str, changes: Mapping[str, Any]) -> Path:
    """Locate the scores of a split, measured with `changes`: RUN/eval-test-segment_length-17.json."""
    words = [split, *(f"{key.rpartition('.')[2]}-{value}" for key, value in changes.items())]
    words = [re.sub(r"[/\\]", "-", word) for word in words]  # a value can be a path; the file stays in the folder
    return folder.path / f"{_PREFIX}{'-'.join(words)}.json"


def write_scores(folder: RunFolder, scores: Mapping[str, Any]) -> Path:
    """Write the scores of a split, which include its name and the overrides, and return the file's path."""
    path = _score_file(folder, scores["split"], scores["changes"])
    write_json(path, scores)
    return path


def staleness(folder: RunFolder, scores: Mapping[str, Any]) -> str:
    """Say which step the scores are from if the run has continued since; empty if they match the checkpoint."""
    if not folder.summary.is_file():
        return ""
    summary = folder.read_summary()
    best = summary["validation"].get("best", {}).get("step")
    now = {"best": best, "last": summary["steps"]}.get(scores.get("checkpoint", ""))
    if now is None or now == scores.get("step"):
        return ""
    return f"scored at step {scores['step']}; its {scores['checkpoint']} checkpoint is now of step {now}"


def find_scores(folder: RunFolder, split: str, changes: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Read the scores of a split, measured with `changes`, that have values for `keys`."""
    file = _score_file(folder, split, changes)
    got = f"{file}, which does not have {' and '.join(keys) or 'them'}"
    scores: dict[str, Any] = {}
    if file.is_file():
        try:
            scores = _read(file)
        except ValueError as error:
            got = f"{file}, which is damaged ({error})"
    if not scores or any(scores.get(key) is None for key in keys):
        words = ["recurra", "eval", str(folder.path)]
        for key, value in changes.items():
            words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
        command = shlex.join(words)
        raise ValueError(sentence("scores", got, "those of a run", f"score it first with\n  {command}"))
    return scores


def read_scores(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Read all scores of a run, by the names of their files without the prefix and suffix: test-segment_length-17."""
    return {file.stem.removeprefix(_PREFIX): _read(file) for file in sorted(folder.path.glob(f"{_PREFIX}*.json"))}


def _read(file: Path) -> dict[str, Any]:
    # What could not be measured may be NaN, and the perplexity of a bad model infinite.
    scores: dict[str, Any] = read_json(file, "the file of scores", hint=AGAIN)
    return scores
