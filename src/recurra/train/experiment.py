"""An experiment: data, a model, and how to train it, in one object.

The key `experiment` of a recipe names a task and a model (`recurra.train.task`), and so the configurations that the
sections `data` and `model` hold.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import reduce
from numbers import Integral
from typing import Any

from torch import nn

from recurra.checks import kind_of, require, sentence
from recurra.data.batches import DataSet
from recurra.models.registry import DataSizes, VideoSizes
from recurra.train.adapters import Adapters, LoraConfig
from recurra.train.config import AveragingConfig, OptimizerConfig, ScheduleConfig, TrainingConfig
from recurra.train.task import Task, find_experiment

_SECTIONS: dict[str, type] = {
    "lora": LoraConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "averaging": AveragingConfig,
    "training": TrainingConfig,
}
"""The sections that all experiments have in common, in a recipe's order."""


@dataclass(kw_only=True)
class Experiment:
    """The configurations of data, model and training; `build_data` and `build_model` make the objects.

    Raises:
        TypeError: the data have no defaults and are missing, or a section is of another experiment.
        ValueError: there is no such experiment, or its sections do not fit together.
    """

    experiment: str
    """The task and the model: see `recurra.train.task.experiment_names`."""
    data: Any = None
    """The configuration of the task's data; None for its defaults."""
    model: Any = None
    """The configuration of the model, without the sizes that the data fill in; None for its defaults."""
    init_from: str | None = None
    """Start from these weights instead of random ones."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters that are trained in place of these weights."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimiser."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over time."""
    averaging: AveragingConfig = field(default_factory=AveragingConfig)
    """The average of the weights over the updates."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """The run."""

    def __post_init__(self) -> None:
        for section, kind in sections_of(self.experiment).items():
            if getattr(self, section) is None:
                setattr(self, section, kind())
            if not isinstance(getattr(self, section), kind):
                expected = f"a {kind.__name__}, for the experiment {self.experiment}"
                raise TypeError(sentence(section, kind_of(getattr(self, section)), expected))
        if (rank := self.lora.rank) is not None:
            hint = "adapters alone would not train a fresh classifier"
            require(self.task.reads is DataSizes, "lora.rank", rank, "null for a task over videos", hint)
            require(self.init_from is not None, "init_from", None, "the weights that the adapters of lora.rank adapt")
            sharded = self.training.strategy == "fsdp"
            require(not sharded, "training.strategy", "fsdp", "ddp with lora.rank", "frozen weights are not sharded")
        self.task.check(self)

    @property
    def task(self) -> Task:
        """The kind of data."""
        return find_experiment(self.experiment)[0]

    def build_data(self, *, rank: int = 0, world_size: int = 1) -> DataSet:
        """Make or open the data set, as one rank of several reads it."""
        return self.task.build_data(self.data, rank=rank, world_size=world_size)

    def build_model(self, data: DataSet) -> nn.Module:
        """Make the model, with fresh weights, in the sizes that `data` needs."""
        model: nn.Module = self.model.build(self.sizes(data))
        return model

    def sizes(self, data: DataSet) -> DataSizes | VideoSizes:
        """Return the sizes that the model takes from `data`."""
        return self.task.sizes(self.data, data)

    def load_initial_weights(self, model: nn.Module, data: DataSet | None = None) -> str:
        """Load the weights of `init_from`, if there are any, into a fresh model; return a line on them, or "".

        `data` are what it is trained on, whose vocabulary the weights must have; None takes any.
        """
        return self.task.load_initial_weights(model, self.init_from, data) if self.init_from else ""

    def add_adapters(self, model: nn.Module) -> Adapters | None:
        """Put the adapters of `lora` on a model whose weights are loaded; None if it has none."""
        return None if self.lora.rank is None else Adapters(model, self.lora)


def sections_of(experiment: str) -> dict[str, type]:
    """Return the sections of an experiment by its name, with their configurations, in a recipe's order."""
    task, model = find_experiment(experiment)
    return {"data": task.data, "model": model.config, **_SECTIONS}


_RUN_ONLY = (
    "epochs max_steps accelerator threads strategy sequence_parallel checkpoint_blocks asynchronous_saving log_every "
    "eval_every save_every keep_checkpoints tensorboard patience stop_at compile graphs"
)
_PLACES = "init_from data.path data.poses data.cache averaging.start_step"
RESUMABLE = frozenset([*_PLACES.split(), *(f"training.{name}" for name in _RUN_ONLY.split())])
"""The settings that may change when a run resumes: how long it lasts, where its files are, how often it reports. Any
other setting would either have no effect (a seed) or make the rest of the run another experiment."""


def to_plain(experiment: Experiment) -> dict[str, Any]:
    """Write the experiment as dicts, lists, strings and numbers, for YAML files and checkpoints."""
    plain: dict[str, Any] = _with_lists(asdict(experiment))
    return plain


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)  # NumPy's are written to no file
    return [_with_lists(item) for item in value] if isinstance(value, (tuple, list)) else value


_OF_MODEL = ("experiment", "lora.rank", "lora.alpha")


def require_same_model(saved: Mapping[str, Any], experiment: Experiment, config: str, checkpoint: str) -> None:
    """Refuse a configuration that describes another model than a checkpoint was made with."""
    changed = _changes(saved, experiment, lambda key: key in _OF_MODEL or key.startswith("model."))
    if changed:
        got = f"not the configuration of {checkpoint} in {', '.join(changed)}"
        hint = "put the values back, or choose a checkpoint of this run"
        raise ValueError(sentence(config, got, "the model that was trained", hint))


def require_resumable(saved: Mapping[str, Any], experiment: Experiment) -> None:
    """Refuse to resume from a checkpoint with other settings than its own."""
    changed = _changes(saved, experiment, lambda key: key not in RESUMABLE)
    if changed:
        got = f"not that of the checkpoint in {', '.join(changed)}"
        hint = f"only {', '.join(sorted(RESUMABLE))} may change"
        raise ValueError(sentence("the experiment", got, "the same settings", hint))


def _with_numbered_mixture(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Let the weights of a mixture have numbers in place of folders, which may lie elsewhere now."""
    if not (mixture := plain["data"].get("mixture")):
        return plain
    return {**plain, "data": {**plain["data"], "mixture": dict(zip(map(str, range(len(mixture))), mixture.values()))}}


def _changes(saved: Mapping[str, Any], experiment: Experiment, counts: Callable[[str], bool]) -> list[str]:
    """List the settings that count and differ from a checkpoint's: "model.n_layer (was 2, now 3)"."""
    found = differences(_with_numbered_mixture(saved), _with_numbered_mixture(to_plain(experiment)))
    known = dict(flat(_with_numbered_mixture(saved)))
    return [
        f"{key} (was {before!r}, now {now!r})"
        for key, (before, now) in found.items()
        if counts(key) and (key in known or not _is_default(experiment, key))  # an option that the run did not know
    ]


def _is_default(experiment: Experiment, key: str) -> bool:
    *path, name = key.split(".")
    part: Any = reduce(getattr, path, experiment)
    own = next((one for one in fields(part) if one.name == name), None) if is_dataclass(part) else None
    if own is None:
        return False
    default = own.default if own.default_factory is MISSING else own.default_factory()
    return bool(getattr(part, name) == default)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Find the dotted keys in which two experiments as plain data differ, with both values; a missing key has None."""
    before, now = dict(flat(one)), dict(flat(other))
    both = {key: (before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts by their dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
