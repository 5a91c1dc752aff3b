"""Experiments: data, model and training in one object, with a class for each kind of data and model.

The key `experiment` of a recipe chooses the class from `EXPERIMENTS`. Every registered language model has one,
`text-NAME`. A new kind of data takes one class with a `data` and a `model` field, and one line in that table.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, make_dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from torch import nn

from recurra.checks import kind_of, require, sentence
from recurra.data import DataSet, MemoryHorizonConfig, TextConfig, TextData, TokenDataSet
from recurra.data.tasks import InductionConfig, RecallConfig, StateTrackingConfig
from recurra.data.video import MotionsConfig, VideoConfig
from recurra.models import DataSizes, LanguageModelShape, ModelEntry, VideoSizes, list_models
from recurra.training.config import AveragingConfig, OptimizerConfig, ScheduleConfig, TrainingConfig
from recurra.training.language_start import start_language_model
from recurra.training.metrics import Unit
from recurra.training.models import (
    CompactRecurrentViTRecipe,
    LanguageModelRecipe,
    ModelRecipe,
    PIViTRecipe,
    TimeSformerRecipe,
    language_model_recipe,
)
from recurra.training.starting_weights import start_from


@runtime_checkable
class DataConfig(Protocol):
    """A config that builds a data set."""

    def build(self, *, rank: int = 0, world_size: int = 1) -> DataSet:
        """Make or open the data set."""
        ...


@dataclass(kw_only=True)
class Experiment:
    """The parts of every experiment: data, a model, and how to train it."""

    unit: ClassVar[Unit] = "tokens"
    """The unit of the data: what its steps are, and how speed is counted."""

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

    def build_data(self, *, rank: int = 0, world_size: int = 1) -> DataSet:
        """Make or open the data set, as one rank of several reads it."""
        return self.data.build(rank=rank, world_size=world_size)

    def build_model(self, data: DataSet) -> nn.Module:
        """Make the model, with fresh weights, in the sizes that `data` needs."""
        return self.model.build(self.sizes(data))

    def sizes(self, data: DataSet) -> DataSizes | VideoSizes:
        """Return the sizes that the model takes from `data`."""
        return DataSizes(_vocab_size(data), data.output_size)

    def load_initial_weights(self, model: nn.Module, data: DataSet | None = None) -> str:
        """Load the weights that the run starts from into a fresh model, if the experiment names any.

        Args:
            model: changed in place.
            data: what it is trained on, whose vocabulary the weights have to have; None takes any.

        Returns:
            a line that says where the weights are from; empty if the fresh ones stay.
        """
        return ""


@dataclass(kw_only=True)
class MemoryHorizonExperiment(Experiment):
    """The Memory Horizon task of the GateLoop paper."""

    experiment: Literal["memory-horizon"] = "memory-horizon"
    """The kind of experiment."""
    data: MemoryHorizonConfig = field(default_factory=MemoryHorizonConfig)
    """The data set."""
    model: LanguageModelShape = field(default_factory=LanguageModelShape)
    """The model."""


@dataclass(kw_only=True)
class TextExperiment(Experiment):
    """Language modelling over a text corpus with a recurrent language model."""

    experiment: Literal["text"] = "text"
    """The kind of experiment."""
    data: TextConfig
    """The corpus."""
    model: LanguageModelRecipe = field(default_factory=LanguageModelRecipe)
    """The model."""

    def __post_init__(self) -> None:
        # in Python the model's shape alone is enough
        recipe = next(field.default_factory for field in fields(self) if field.name == "model")
        if not hasattr(self.model, "init_from"):
            self.model = recipe(**vars(self.model))  # type: ignore[operator]

    def sizes(self, data: DataSet) -> DataSizes:
        """Return the sizes that the model takes from `data`: the vocabulary and the length of a segment."""
        return DataSizes(_vocab_size(data), data.output_size, self.data.segment_length)

    def load_initial_weights(self, model: nn.Module, data: DataSet | None = None) -> str:
        """Load the weights of `model.init_from` into a fresh model."""
        encoder = data.corpus.encoder if isinstance(data, TextData) else None
        return start_language_model(model, self.model.init_from, encoder) if self.model.init_from else ""


def experiment_name(entry: ModelEntry) -> str:
    """Return what a recipe calls the experiment of a registered language model over a text corpus."""
    return "text" if entry.shape is LanguageModelShape else f"text-{entry.name}"


def _text_experiment(entry: ModelEntry) -> type[TextExperiment]:
    """Make the experiment of a registered language model: a corpus, and the model's shape."""
    if (name := experiment_name(entry)) == TextExperiment.experiment:
        return TextExperiment
    recipe = language_model_recipe(entry)
    kind = make_dataclass(
        f"{entry.label}Experiment",
        [
            ("experiment", Literal[name], field(default=name)),
            ("model", recipe, field(default_factory=recipe)),
        ],
        bases=(TextExperiment,),
        kw_only=True,
    )
    kind.__doc__ = f"Language modelling over a text corpus with `{entry.model.__name__}`."
    kind.__module__ = __name__
    return kind


def _task_experiment(name: str, data: type[DataConfig], about: str) -> type[Experiment]:
    """Make the experiment of a generated task: its data, and a recurrent language model."""
    kind = make_dataclass(
        "".join(map(str.capitalize, name.split("-"))) + "Experiment",
        [
            ("experiment", Literal[name], field(default=name)),
            ("data", data, field(default_factory=data)),
            ("model", LanguageModelShape, field(default_factory=LanguageModelShape)),
        ],
        bases=(Experiment,),
        kw_only=True,
    )
    kind.__doc__ = about
    kind.__module__ = __name__
    return kind


def _vocab_size(data: DataSet) -> int:
    if not isinstance(data, TokenDataSet):
        raise TypeError(sentence("data", kind_of(data), "a data set of tokens, for a language model"))
    return data.vocab_size


@dataclass(kw_only=True)
class VideoExperiment(Experiment):
    """The common parts of experiments over videos: segments of frames, and weights to start from."""

    unit: ClassVar[Unit] = "frames"

    experiment: str
    data: VideoConfig | MotionsConfig
    model: TimeSformerRecipe | PIViTRecipe | CompactRecurrentViTRecipe

    def __post_init__(self) -> None:
        if not isinstance(self.model, PIViTRecipe):
            require(getattr(self.data, "poses", None) is None, "data.poses", "a folder", "null but for PI-ViT")

    def sizes(self, data: DataSet) -> VideoSizes:
        """Return the sizes that the model takes from `data`: the classes and the size of a segment."""
        return self.sizes_of(data.output_size)

    def sizes_of(self, n_classes: int) -> VideoSizes:
        """Return the sizes for a data set with this many classes; it does not have to exist on disk."""
        return VideoSizes(n_classes, self.data.n_frames, self.data.image_size)

    def load_initial_weights(self, model: nn.Module, data: DataSet | None = None) -> str:
        """Load the weights of `model.init_from` into a fresh model."""
        return start_from(model, self.model.init_from) if self.model.init_from else ""  # type: ignore[arg-type]


@dataclass(kw_only=True)
class TimeSformerExperiment(VideoExperiment):
    """Classification of videos with TimeSformer, which sees each segment on its own."""

    experiment: Literal["video-timesformer"] = "video-timesformer"
    """The kind of experiment."""
    data: VideoConfig
    """The videos."""
    model: TimeSformerRecipe = field(default_factory=TimeSformerRecipe)
    """The model."""


@dataclass(kw_only=True)
class CompactRecurrentViTExperiment(VideoExperiment):
    """Classification of videos with the compact recurrent vision Transformer."""

    experiment: Literal["video-crvit"] = "video-crvit"
    """The kind of experiment."""
    data: VideoConfig
    """The videos."""
    model: CompactRecurrentViTRecipe = field(default_factory=CompactRecurrentViTRecipe)
    """The model."""


@dataclass(kw_only=True)
class PIViTExperiment(VideoExperiment):
    """Classification of videos with PI-ViT, a TimeSformer that learns from `data.poses` in training."""

    experiment: Literal["video-pi-vit"] = "video-pi-vit"
    """The kind of experiment."""
    data: VideoConfig
    """The videos, with poses."""
    model: PIViTRecipe = field(default_factory=PIViTRecipe)
    """The model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        q = self.training.generalised_cross_entropy
        require(not q, "training.generalised_cross_entropy", q, "0 for PI-ViT, whose loss is not of classes alone")


@dataclass(kw_only=True)
class MotionsTimeSformerExperiment(TimeSformerExperiment):
    """The generated motions with TimeSformer."""

    experiment: Literal["motions-timesformer"] = "motions-timesformer"  # type: ignore[assignment]
    """The kind of experiment."""
    data: MotionsConfig = field(default_factory=MotionsConfig)  # type: ignore[assignment]
    """The videos, which are written on first use."""


@dataclass(kw_only=True)
class MotionsCompactRecurrentViTExperiment(CompactRecurrentViTExperiment):
    """The generated motions with the compact recurrent vision Transformer."""

    experiment: Literal["motions-crvit"] = "motions-crvit"  # type: ignore[assignment]
    """The kind of experiment."""
    data: MotionsConfig = field(default_factory=MotionsConfig)  # type: ignore[assignment]
    """The videos, which are written on first use."""


EXPERIMENTS: dict[str, type[Experiment]] = {
    "memory-horizon": MemoryHorizonExperiment,
    **{kind.experiment: kind for kind in map(_text_experiment, sorted(list_models(DataSizes), key=experiment_name))},
    "video-timesformer": TimeSformerExperiment,
    "video-pi-vit": PIViTExperiment,
    "video-crvit": CompactRecurrentViTExperiment,
    "motions-timesformer": MotionsTimeSformerExperiment,
    "motions-crvit": MotionsCompactRecurrentViTExperiment,
    "state-tracking": _task_experiment(
        "state-tracking", StateTrackingConfig, "Parity, modular arithmetic and word problems."
    ),
    "recall": _task_experiment("recall", RecallConfig, "Multi-query associative recall."),
    "induction": _task_experiment("induction", InductionConfig, "Induction heads."),
}

RESUMABLE = frozenset(
    {
        "data.path",
        "data.poses",
        "data.cache",
        "averaging.start_step",
        "training.epochs",
        "training.max_steps",
        "training.accelerator",
        "training.threads",
        "training.strategy",
        "training.sequence_parallel",
        "training.checkpoint_blocks",
        "training.asynchronous_saving",
        "training.log_every",
        "training.eval_every",
        "training.save_every",
        "training.keep_checkpoints",
        "training.tensorboard",
        "training.patience",
        "training.stop_at",
        "training.compile",
    }
)
"""The settings that may change when a run resumes: how long it lasts, where its files are, how often it reports. Any
other setting would either have no effect (a seed) or make the rest of the run another experiment."""


def to_plain(experiment: Experiment) -> dict[str, Any]:
    """Write the experiment as dicts, lists, strings and numbers, for YAML files and checkpoints."""
    return _plain(asdict(experiment))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def require_same_model(saved: Mapping[str, Any], experiment: Experiment, config: str, checkpoint: str) -> None:
    """Refuse a configuration that describes another model than a checkpoint was made with.

    Raises:
        ValueError: a setting of the model differs; the message names the keys and both values.
    """
    changed = _changes(saved, experiment, _describes_model)
    if changed:
        came = f"not the configuration of {checkpoint} in {', '.join(changed)}"
        raise ValueError(
            sentence(
                config, came, "the model that was trained", "put the values back, or choose a checkpoint of this run"
            )
        )


def require_resumable(saved: Mapping[str, Any], experiment: Experiment) -> None:
    """Refuse to resume from a checkpoint with other settings than its own.

    Raises:
        ValueError: a setting outside `RESUMABLE` differs; the message names the keys and both values.
    """
    changed = _changes(_with_numbered_mixture(saved), experiment, lambda key: key not in RESUMABLE)
    if changed:
        came = f"not that of the checkpoint in {', '.join(changed)}"
        mend = f"only {', '.join(sorted(RESUMABLE))} may change"
        raise ValueError(sentence("the experiment", came, "the same settings", mend))


def _with_numbered_mixture(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Let the weights of a mixture have numbers in place of folders, which may lie elsewhere now."""
    data = plain.get("data")
    if not (isinstance(data, Mapping) and isinstance(mixture := data.get("mixture"), Mapping)):
        return plain
    return {**plain, "data": {**data, "mixture": {str(n): weight for n, weight in enumerate(mixture.values())}}}


def _describes_model(key: str) -> bool:
    # where a fresh model's weights came from is no part of what it computes
    return key == "experiment" or (key.startswith("model.") and key != "model.init_from")


def _changes(saved: Mapping[str, Any], experiment: Experiment, counts: Callable[[str], bool]) -> list[str]:
    """List the settings that count and differ from a checkpoint's: "model.n_layer (was 2, now 3)"."""
    # A checkpoint without a key is older than the setting, and was made with what is now its default.
    known = {key for key, _ in flat(saved)}
    return [
        f"{key} (was {before!r}, now {now!r})"
        for key, (before, now) in differences(saved, _with_numbered_mixture(to_plain(experiment))).items()
        if counts(key) and (key in known or now != _plain(_default(experiment, key)))
    ]


def _default(experiment: Experiment, key: str) -> Any:
    """Find the default of a dotted key; MISSING if it has none."""
    *sections, name = key.split(".")
    owner: Any = experiment
    for section in sections:
        owner = getattr(owner, section, None)
    if not is_dataclass(owner):
        return MISSING
    found = next((field for field in fields(owner) if field.name == name), None)
    if found is None:
        return MISSING
    return found.default if found.default_factory is MISSING else found.default_factory()


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Find the dotted keys in which two experiments as plain data differ, with both values; a missing key has None."""
    before, now = dict(flat(one)), dict(flat(other))
    return {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts by their dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
