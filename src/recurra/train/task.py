"""Tasks: everything that the rest of the package needs to know about a kind of data.

A new kind of data is one file in `recurra.train.tasks`: a configuration, and a class with `@register_task(name)`.
Recipes then use it as `experiment: NAME`, or `experiment: NAME-MODEL` with a model other than the default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import nn

from recurra.checks import sentence
from recurra.data.batches import Batch, DataSet
from recurra.models.registry import DataSizes, ModelEntry, VideoSizes, find_model, list_models
from recurra.ops._toolkit.graphs import capture_on
from recurra.registry import Registry
from recurra.train.evaluate import best_temperature, evaluate
from recurra.train.metrics import Unit
from recurra.train.run_folder import RunFolder

if TYPE_CHECKING:
    from recurra.train.experiment import Experiment

_TaskClass = TypeVar("_TaskClass", bound="type[Task]")


class Task:
    """A kind of data. A registered task describes its data and raises ValueError for unsupported operations.

    A `run` is a `recurra.train.run.Run`, `data` a configuration of the task's own kind.
    """

    name: str
    """In recipes, as `experiment: NAME`; set when it is registered."""
    data: ClassVar[type[Any]]
    """The configuration of the data, the section `data` of a recipe."""
    reads: ClassVar[type] = DataSizes
    """What its models take from the data: `DataSizes` for tokens, `VideoSizes` for clips."""
    unit: ClassVar[Unit] = "tokens"
    """The unit of the data's steps, in which speed is counted."""
    default_model: ClassVar[str | None] = "recurrent"
    """The model of `experiment: NAME`; None if recipes always name one."""
    has_spans: ClassVar[bool] = False
    """Whether accuracy is measured by memory span."""
    drawn_scores: ClassVar[tuple[str, ...]] = ()
    """The scores that a run's figures show, which `recurra eval` measures first."""

    def models(self) -> list[ModelEntry]:
        """List the models that it can train; only the default one if a task does not say otherwise."""
        return [find_model(self.default_model)] if self.default_model else list_models(self.reads)

    def check(self, experiment: Experiment) -> None:
        """Refuse an experiment whose sections do not fit together. Raises ValueError."""

    def build_data(self, data: Any, *, rank: int = 0, world_size: int = 1) -> DataSet:
        """Make or open the data, as one rank of several reads them."""
        made: DataSet = data.build(rank=rank, world_size=world_size)
        return made

    def open_data(self, data: Any, folder: RunFolder, *, rank: int = 0, world_size: int = 1) -> DataSet:
        """Open the data of a run, with the vocabulary or classes that it has learned."""
        return self.build_data(data, rank=rank, world_size=world_size)

    def fingerprint(self, opened: Any) -> str | None:
        """Digest what the opened data contain, wherever they lie; None if their configuration determines it."""
        return None

    def sizes(self, data: Any, opened: Any) -> DataSizes | VideoSizes:
        """Return the sizes that a model takes from the opened data."""
        raise NotImplementedError

    def sizes_of_run(self, run: Any) -> DataSizes | VideoSizes:
        """Return the sizes of a run's model, without its data wherever the folder tells them."""
        return self.sizes(run.experiment.data, run.data)

    def sizes_of_vocabulary(self, experiment: Experiment, n_tokens: int) -> DataSizes:
        """Return the sizes for a vocabulary, without the text. Raises ValueError if the task is not over text."""
        raise ValueError(sentence("experiment", experiment.experiment, "one over text", "--vocabulary is for these"))

    def load_initial_weights(self, model: nn.Module, path: str, data: DataSet | None = None) -> str:
        """Load the weights of `init_from` into a fresh model for `data`, and return a line on them.

        Raises ValueError if the task has no such weights.
        """
        raise ValueError(sentence("init_from", path, f"null: runs of {self.name} start from fresh weights"))

    def save_extras(self, opened: Any, folder: RunFolder) -> None:
        """Write the meaning of a model's inputs or classes: a tokenizer or the names of the classes.

        Raises ValueError, before anything is written, for names that cannot be saved.
        """

    def tokenizer(self, run: Any) -> Any:
        """Load the tokenizer of a run over text. Raises ValueError if it is not over text."""
        raise self.refusal(run, "over text")

    def class_names(self, run: Any) -> tuple[str, ...]:
        """Load the names of the classes of a run over videos. Raises ValueError if it is not over videos."""
        raise self.refusal(run, "over videos")

    def has_tokenizer(self) -> bool:
        """Whether its runs are over text."""
        return False

    def explored(self, run: Any) -> dict[str, Any] | None:
        """Say, as JSON, what a run's tokens are; None if the explorer has no view for them."""
        return None

    def n_steps(self, experiment: Experiment) -> int:
        """Count the steps between two updates of a state. Raises ValueError if its models cannot be counted."""
        expected = "one over text or on Memory Horizon: only their models can be counted"
        raise ValueError(sentence("experiment", experiment.experiment, expected))

    def lengths(self, experiment: Experiment) -> dict[str, int]:
        """Return the lengths that belong to scores: of a segment, and of a model's memory."""
        return {}

    def score(self, run: Any, split: str, temperature: float | None) -> dict[str, Any]:
        """Score a run on a split."""
        raise NotImplementedError

    def score_by_span(self, run: Any) -> Any:
        """Score by memory span. Raises ValueError for data without spans."""
        raise self.refusal(run, "on Memory Horizon")

    def best_temperature(self, run: Any) -> float:
        """Find the temperature with the lowest validation loss. Raises ValueError if there is none to find."""
        raise NotImplementedError

    def curve(self, records: Sequence[dict[str, Any]]) -> None:
        """Add to the records of a log what else its curves show."""

    def gate_tokens(self, batch: Batch) -> Any:
        """Return the sequence of a batch, (1, L), over which the gates of a model are drawn."""
        return batch.inputs[:1]

    def reset_token(self, run: Any) -> int | None:
        """Return the token that figures mark as a reset; None if there is none."""
        return None

    def figures_of_scores(self, run: Any, split: str, scores: Any) -> list[Path]:
        """Draw what the scores of a split show, those named in `drawn_scores`, into the run's folder of figures."""
        return []

    def refusal(self, run: Any, wanted: str) -> ValueError:
        """Say that a run is not of the kind that is wanted."""
        return ValueError(sentence("run", f"{run.folder.path}, a run of {run.experiment.experiment}", f"one {wanted}"))


class TokenTask(Task):
    """A task whose data are tokens and targets."""

    def sizes(self, data: Any, opened: Any) -> DataSizes:
        """Return the numbers of tokens and of targets."""
        return DataSizes(opened.vocab_size, opened.output_size)

    def score(
        self, run: Any, split: str, temperature: float | None, observe: Callable[..., None] | None = None
    ) -> dict[str, Any]:
        """Score a run on a split; `observe` sees every batch with its predictions."""
        divisor = 1.0 if temperature is None else temperature
        capture = capture_on(next(run.model.parameters()).device, run.experiment.training.graphs)
        source = run.data.source(split)
        return evaluate(run.model, source, temperature=divisor, observe=observe, capture=capture)._asdict()

    def best_temperature(self, run: Any) -> float:
        """Find the temperature with the lowest validation loss."""
        return best_temperature(run.model, run.data.source("valid"))


_tasks: Registry[Task] = Registry("task", "recurra.train.tasks", "recurra.video")


def register_task(name: str) -> Callable[[_TaskClass], _TaskClass]:
    """Register a task class under `name`; recipes, runs and the command line can then use it."""

    def register(kind: _TaskClass) -> _TaskClass:
        task = kind()
        task.name = name
        _tasks.register(name)(task)
        return kind

    return register


def find_task(name: str) -> Task:
    """Return a task by name. Raises ValueError, with the valid names, if there is none."""
    return _tasks[name]


def experiment_names() -> list[str]:
    """List the valid values of `experiment` in a recipe: TASK for its default model, TASK-MODEL for others."""
    return list(_experiments())


def find_experiment(name: str) -> tuple[Task, ModelEntry]:
    """Return the task and the model of an experiment by its name."""
    known = _experiments()
    if name not in known:
        raise ValueError(sentence("experiment", repr(name), f"one of {', '.join(known)}"))
    return known[name]


def experiment_name(task: Task, model: ModelEntry) -> str:
    """Return what recipes call a task with a model."""
    return task.name if model.name == task.default_model else f"{task.name}-{model.name}"


def _experiments() -> dict[str, tuple[Task, ModelEntry]]:
    pairs = [(_tasks[name], model) for name in _tasks for model in _tasks[name].models()]
    named = {experiment_name(*pair): pair for pair in pairs}
    return {name: named[name] for name in sorted(named)}
