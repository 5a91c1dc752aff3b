"""The registry of models: a name, the shape that recipes set, the configuration, and the class.

A new model is one file and one line: `@register_model(...)` above its class. Recipes, checkpoints, converters, Hugging
Face, the exports, `recurra cost` and the contract tests read the registry.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, TypeVar

from torch import nn

from recurra.checks import sentence
from recurra.registry import Registry

Class = TypeVar("Class", bound=type[nn.Module])


class DataSizes(NamedTuple):
    """What a model of tokens takes from its data.

    vocab_size: number of values that an input may take. output_size: number of values that a target may take.
    segment_length: steps of a segment, for models that read segments; None if the data have none.
    """

    vocab_size: int
    output_size: int
    segment_length: int | None = None


class VideoSizes(NamedTuple):
    """What a model of videos takes from its data.

    n_classes: number of classes. n_frames: frames of a segment. image_size: pixels of a frame's edge.
    """

    n_classes: int
    n_frames: int
    image_size: int


@dataclass(frozen=True)
class ModelEntry:
    """A registered model."""

    name: str
    """In recipes, as `experiment: text-NAME` for a language model, and in `recurra info`."""
    label: str
    """In the names of its classes for Hugging Face: Recurra<label>ForCausalLM."""
    reads: type
    """What it reads: `DataSizes` for tokens, `VideoSizes` for clips."""
    shape: Any
    """The fields that a recipe sets: a dataclass."""
    config: Any
    """The shape and the sizes that the data give: a dataclass, the argument of `model`."""
    model: type[nn.Module]
    """The class."""

    @property
    def is_language_model(self) -> bool:
        """Whether it reads tokens."""
        return self.reads is DataSizes

    @property
    def sizes_from_data(self) -> list[str]:
        """The fields of the configuration that the data give."""
        own = {field.name for field in fields(self.shape)}
        return [field.name for field in fields(self.config) if field.name not in own]

    def build(self, shape: Any, sizes: Any) -> nn.Module:
        """Make a model of a shape for the sizes of its data, with fresh weights.

        Raises:
            TypeError: the sizes are those of other data.
            ValueError: the model reads segments, and the data have none; or its weights do not fit in memory.
        """
        if not isinstance(sizes, self.reads):
            raise TypeError(
                f"sizes is a {type(sizes).__name__}; expected {self.reads.__name__} for model {self.name!r}"
            )
        given = {name: getattr(sizes, name) for name in self.sizes_from_data}
        if given.get("segment_length", 0) is None:
            raise ValueError(f"segment_length is None; expected data with segments: model {self.name!r} reads segments")
        set_by_recipe = {field.name: getattr(shape, field.name) for field in fields(self.shape)}
        return self.make(self.config(**given, **set_by_recipe))

    def make(self, config: Any) -> nn.Module:
        """Make a model with fresh weights. Raises ValueError if memory for them could not be allocated."""
        try:
            return self.model(config)
        except (MemoryError, RuntimeError) as error:
            if "allocate" not in str(error) and not isinstance(error, MemoryError):
                raise
            reason = str(error).partition("\n")[0]
            raise ValueError(
                sentence("model", f"one that does not fit in memory ({reason})", "smaller sizes")
            ) from error

    def shape_of(self, config: Any) -> dict[str, Any]:
        """Return what a recipe would set to get this configuration, as plain data."""
        plain = asdict(config)
        return {field.name: plain[field.name] for field in fields(self.shape)}


_models: Registry[ModelEntry] = Registry("model")


def register_model(
    name: str, *, shape: type, config: type, label: str | None = None, reads: type = DataSizes
) -> Callable[[Class], Class]:
    """Register a model class under `name`; it is called as `cls(config)`.

    Args:
        name: the model's name, in lower case and with hyphens.
        shape: the dataclass of what a recipe sets.
        config: the dataclass of that and the sizes that the data give; it has the shape's fields.
        label: its name in the classes for Hugging Face; the name in camel case if None.
        reads: `DataSizes` or `VideoSizes`.
    """

    def register(model: Class) -> Class:
        camel = "".join(word.capitalize() for word in name.split("-"))
        _models.register(name)(ModelEntry(name, label or camel, reads, shape, config, model))
        return model

    return register


def list_models(reads: type | None = None) -> list[ModelEntry]:
    """List the registered models by name; those that read `DataSizes` or `VideoSizes` only, if given."""
    entries = [_models[name] for name in _models]
    return [entry for entry in entries if reads is None or entry.reads is reads]


def find_model(name: str) -> ModelEntry:
    """Return the entry of a model by its name. Raises ValueError, with the names that exist, if there is none."""
    return _models[name]


def entry_of(model: nn.Module) -> ModelEntry:
    """Return the entry of a model.

    Raises:
        TypeError: its class is not registered.
    """
    for entry in list_models():
        if type(model) is entry.model:
            return entry
    known = ", ".join(entry.model.__name__ for entry in list_models())
    raise TypeError(f"model is a {type(model).__name__}; expected one of {known}")


@dataclass  # recipes are parsed field by field if every base is a dataclass
class BuildsModel:
    """What makes a registered shape a recipe: it builds its model once the data are known."""

    def build(self, sizes: Any) -> Any:
        """Make the model with fresh weights.

        Args:
            sizes: the data's: `DataSizes` or `VideoSizes`.

        Raises:
            TypeError, ValueError: as `ModelEntry.build`.
        """
        entries = [entry for entry in list_models() if isinstance(self, entry.shape)]
        entry = max(entries, key=lambda entry: len(entry.shape.__mro__))  # a shape may extend another model's
        return entry.build(self, sizes)
