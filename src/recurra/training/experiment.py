"""Experiments: data, model and training in one object, a class for each kind of data and model.

A recipe's key `experiment` chooses the class from `EXPERIMENTS`. A new kind is one class with a `data` and a `model`
field and one line in that table; the loop, the recipes and the command line then know it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn

from recurra.data import DataSet, MemoryHorizonConfig, TextConfig
from recurra.training.config import AveragingConfig, OptimizerConfig, ScheduleConfig, TrainingConfig
from recurra.training.models import (
    CompactRecurrentTransformerRecipe,
    DataSizes,
    ModelConfig,
    ModelRecipe,
    TransformerXLRecipe,
)


@runtime_checkable
class DataConfig(Protocol):
    """What builds a data set."""

    def build(self, *, rank: int = 0, world_size: int = 1) -> DataSet:
        """Make the data set, or open it."""
        ...


@dataclass(kw_only=True)
class Experiment:
    """What all experiments have: data, a model, and how to train it."""

    experiment: str
    data: DataConfig
    model: ModelRecipe
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimiser."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over time."""
    averaging: AveragingConfig = field(default_factory=AveragingConfig)
    """The average of the weights over the updates."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """The run."""

    def build_data(self) -> DataSet:
        """Make or open the data set."""
        return self.data.build()

    def build_model(self, data: DataSet) -> nn.Module:
        """Make the model for the sizes of `data`, with fresh weights."""
        return self.model.build(self.sizes(data))

    def sizes(self, data: DataSet) -> DataSizes:
        """What the model takes from `data`."""
        return DataSizes(data.vocab_size, data.output_size)


@dataclass(kw_only=True)
class MemoryHorizonExperiment(Experiment):
    """The Memory Horizon task of the GateLoop paper."""

    experiment: Literal["memory-horizon"] = "memory-horizon"
    """The kind of experiment."""
    data: MemoryHorizonConfig = field(default_factory=MemoryHorizonConfig)
    """The data set."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""


@dataclass(kw_only=True)
class TextExperiment(Experiment):
    """Language modelling over a text corpus with a recurrent language model."""

    experiment: Literal["text"] = "text"
    """The kind of experiment."""
    data: TextConfig
    """The corpus."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""

    def sizes(self, data: DataSet) -> DataSizes:
        """What the model takes from `data`: the vocabulary, and what a segment is."""
        return DataSizes(data.vocab_size, data.output_size, self.data.segment_length)


@dataclass(kw_only=True)
class TransformerXLExperiment(TextExperiment):
    """Language modelling with Transformer-XL, or, without a memory, with the Transformer."""

    experiment: Literal["text-transformer-xl"] = "text-transformer-xl"  # type: ignore[assignment]
    """The kind of experiment."""
    model: TransformerXLRecipe = field(default_factory=TransformerXLRecipe)  # type: ignore[assignment]
    """The model."""


@dataclass(kw_only=True)
class CompactRecurrentTransformerExperiment(TextExperiment):
    """Language modelling with the Compact Recurrent Transformer."""

    experiment: Literal["text-crt"] = "text-crt"  # type: ignore[assignment]
    """The kind of experiment."""
    model: CompactRecurrentTransformerRecipe = field(  # type: ignore[assignment]
        default_factory=CompactRecurrentTransformerRecipe
    )
    """The model."""


EXPERIMENTS: dict[str, type[Experiment]] = {
    "memory-horizon": MemoryHorizonExperiment,
    "text": TextExperiment,
    "text-transformer-xl": TransformerXLExperiment,
    "text-crt": CompactRecurrentTransformerExperiment,
}

RESUMABLE = frozenset(
    {
        "data.path",
        "data.cache",
        "training.epochs",
        "training.max_steps",
        "training.accelerator",
        "training.threads",
        "training.log_every",
        "training.eval_every",
        "training.save_every",
        "training.keep_checkpoints",
        "training.tensorboard",
    }
)
"""What may change when a run is resumed: how long it goes on, where things lie, how often it reports.
Anything else would either be ignored (a seed) or make the rest of the run another experiment."""


def to_plain(experiment: Experiment) -> dict[str, Any]:
    """The experiment as dicts, lists, strings and numbers: for YAML files and checkpoints."""
    return _plain(asdict(experiment))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def require_resumable(saved: Mapping[str, Any], experiment: Experiment) -> None:
    """Refuse to go on from a checkpoint with settings that are not its own.

    Raises:
        ValueError: something outside `RESUMABLE` differs; the message names the keys and both values.
    """
    changed = [
        f"{key} (was {before!r}, now {now!r})"
        for key, (before, now) in differences(saved, to_plain(experiment)).items()
        if key not in RESUMABLE
    ]
    if changed:
        raise ValueError(
            f"a run goes on with the settings that it was started with; changed: {', '.join(changed)}. "
            f"Only these may change: {', '.join(sorted(RESUMABLE))}"
        )


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys, dotted, in which two experiments as plain data differ, with both values; None where one has no such
    key."""
    before, now = dict(_flat(one)), dict(_flat(other))
    return {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
