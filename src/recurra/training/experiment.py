"""Experiments: data, model and training in one object, a class for each kind of data.

A recipe's key `experiment` chooses the class from `EXPERIMENTS`. A new kind of data is one class with a
`data` field and one line in that table; the loop, the recipes and the command line then know it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from recurra.data import DataSet, MemoryHorizonConfig, TextConfig
from recurra.models import LanguageModel, LanguageModelConfig
from recurra.training.config import OptimizerConfig, ScheduleConfig, TrainingConfig, require


@runtime_checkable
class DataConfig(Protocol):
    """What builds a data set."""

    def build(self, *, rank: int = 0, world_size: int = 1) -> DataSet:
        """Make the data set, or open it."""
        ...


@dataclass
class ModelConfig:
    """A recurrent language model; how many tokens it reads and predicts is the data's business."""

    n_layer: int = 4
    """Blocks, each a time mixing and a channel mixing layer."""
    d_model: int = 64
    """Channels between the layers."""
    d_channel_mixing: int = 128
    """Channels inside a feed-forward layer."""
    mixer: str | list[str] = "gateloop"
    """The time mixing layer of all blocks, or one name for each; `recurra info` lists them."""
    mixer_options: dict[str, Any] = field(default_factory=dict)
    """Options of the time mixing layer; for gateloop: d_qk, d_v, n_heads, transition, magnitude_activation,
    phase_activation, output_gate."""
    tie_embeddings: bool = False
    """Use the token embedding as the output head too."""
    dropout: float = 0.0
    """Share of activations that are dropped in training, in [0, 1)."""

    def __post_init__(self) -> None:
        for name in ("n_layer", "d_model", "d_channel_mixing"):
            value = getattr(self, name)
            require(value >= 1, f"model.{name}", "1 or more", value)
        require(0 <= self.dropout < 1, "model.dropout", "in [0, 1)", self.dropout)

    def for_data(self, data: DataSet) -> LanguageModelConfig:
        """The complete configuration, with the data's sizes."""
        return LanguageModelConfig(vocab_size=data.vocab_size, output_size=data.output_size, **vars(self))


@dataclass(kw_only=True)
class Experiment:
    """What all experiments have: a model, and how to train it."""

    experiment: str
    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimiser."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over time."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """The run."""

    def build_data(self) -> DataSet:
        """Make or open the data set."""
        return self.data.build()

    def build_model(self, data: DataSet) -> LanguageModel:
        """Make the model for the sizes of `data`, with fresh weights."""
        return LanguageModel(self.model.for_data(data))


@dataclass(kw_only=True)
class MemoryHorizonExperiment(Experiment):
    """The Memory Horizon task of the GateLoop paper."""

    experiment: Literal["memory-horizon"] = "memory-horizon"
    """The kind of experiment."""
    data: MemoryHorizonConfig = field(default_factory=MemoryHorizonConfig)
    """The data set."""


@dataclass(kw_only=True)
class TextExperiment(Experiment):
    """Language modelling over a text corpus."""

    experiment: Literal["text"] = "text"
    """The kind of experiment."""
    data: TextConfig
    """The corpus."""


EXPERIMENTS: dict[str, type[Experiment]] = {
    "memory-horizon": MemoryHorizonExperiment,
    "text": TextExperiment,
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
    before, now = dict(_flat(saved)), dict(_flat(to_plain(experiment)))
    changed = [
        f"{key} (was {before.get(key)!r}, now {now.get(key)!r})"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in RESUMABLE
    ]
    if changed:
        raise ValueError(
            f"a run goes on with the settings that it was started with; changed: {', '.join(changed)}. "
            f"Only these may change: {', '.join(sorted(RESUMABLE))}"
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
