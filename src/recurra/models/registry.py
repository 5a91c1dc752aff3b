"""The registry of models: a name, the configuration and the class; and models in outline, on the device `meta`.

A configuration says what a recipe sets and, in the fields made by `from_data`, the sizes that the data fill in: None in
a recipe, filled in by `with_sizes`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from recurra.checks import require, sentence
from recurra.registry import Registry

_INITIALISERS = {function for name, function in vars(nn.init).items() if name.endswith("_") and name[0] != "_"}
_INITIALISERS |= {Tensor.normal_, Tensor.uniform_}
_WRITERS = _INITIALISERS | {Tensor.zero_, Tensor.fill_}


@contextmanager
def on_meta() -> Iterator[None]:
    """Create models without allocating or initialising their weights.

    `torch.device("meta")` alone allocates nothing; skipping initialisation halves the time for a model of many layers.
    """
    with torch.device("meta"), Undrawn():
        yield


class Undrawn(TorchFunctionMode):
    """Create models whose weights will all be replaced: parameters keep what their memory held.

    Drawing the weights of a large model takes as long as reading them from a file. On `meta`, nothing is filled at all,
    and linspace makes its tensors there.
    """

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _WRITERS:
            tensor: Tensor = args[0] if args else kwargs["tensor"]
            is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
            if tensor.is_meta or (is_weight and function in _INITIALISERS):
                return tensor
        if function is torch.linspace:
            kwargs = {"device": torch.get_default_device(), **kwargs}
        return function(*args, **kwargs)


_Class = TypeVar("_Class", bound=type[nn.Module])
_Config = TypeVar("_Config", bound="ModelConfig")

if TYPE_CHECKING:
    Size: TypeAlias = int
else:
    Size: TypeAlias = int | None
"""A size that the data give; whoever reads it in a model finds a number."""


class DataSizes(NamedTuple):
    """Sizes that a token model takes from its data.

    `segment_length` is None if the data have no segments.
    """

    vocab_size: int
    output_size: int
    segment_length: int | None = None


class VideoSizes(NamedTuple):
    """Sizes that a video model takes from its data: frames per segment, and pixels per edge."""

    n_classes: int
    n_frames: int
    image_size: int


def from_data(*, optional: bool = False) -> Any:
    """Declare a field of a configuration that the data fill in: None until then, or for good if it is optional."""
    return field(default=None, metadata={"from_data": True, "optional": optional})


@dataclass(frozen=True)
class ModelConfig:
    """Base class of model configurations; each is registered together with its model class."""

    @classmethod
    def sizes_from_data(cls) -> list[str]:
        """Return the names of the fields that the data fill in."""
        return [each.name for each in fields(cls) if "from_data" in each.metadata]

    def given_sizes(self) -> dict[str, int]:
        """Return the sizes that are filled in."""
        given = {name: getattr(self, name) for name in self.sizes_from_data()}
        return {name: size for name, size in given.items() if size is not None}

    def with_sizes(self: _Config, sizes: DataSizes | VideoSizes) -> _Config:
        """Return this configuration with the sizes of its data.

        Raises ValueError if a size is missing, or set to another value already.
        """
        found = {name: getattr(sizes, name) for name in self.sizes_from_data()}
        if found.get("segment_length", 0) is None:
            raise ValueError("segment_length is None; expected data with segments, which this model reads")
        for name, size in self.given_sizes().items():
            require(size == found[name], name, size, f"{found[name]}, as in the data", "leave it out")
        return replace(self, **found)

    def require_sizes(self) -> None:
        """Refuse to create a model if a size is missing. Raises ValueError."""
        given = self.given_sizes()
        for each in fields(self):
            if "from_data" in each.metadata and not each.metadata["optional"] and each.name not in given:
                expected = f"a number, to make a model of a {type(self).__name__}"
                raise ValueError(sentence(each.name, None, expected, "set it, or fill in the data's with with_sizes"))

    def build(self, sizes: DataSizes | VideoSizes) -> Any:
        """Create the model for the sizes of its data, with newly initialised weights.

        Raises TypeError or ValueError if the sizes are those of other data, or the weights do not fit in memory.
        """
        entry = next(entry for entry in list_models() if entry.config is type(self))
        if not isinstance(sizes, entry.reads):
            got, expected = type(sizes).__name__, entry.reads.__name__
            raise TypeError(f"sizes is a {got}; expected {expected} for model {entry.name!r}")
        return entry.make(self.with_sizes(sizes))

    def without_sizes(self) -> dict[str, Any]:
        """Return the recipe settings for this configuration, as plain data."""
        sizes = self.sizes_from_data()
        return {name: value for name, value in asdict(self).items() if name not in sizes}


@dataclass(frozen=True)
class ModelEntry:
    """A registered model."""

    name: str
    """In recipes, as `experiment: text-NAME` for a language model, in `recurra info` and in transformers' folders."""
    reads: type
    """What it reads: `DataSizes` for tokens, `VideoSizes` for clips."""
    config: type[Any]
    """The class of its configuration, a `ModelConfig`: the argument of `model`."""
    model: type[nn.Module]
    """The class."""

    @property
    def is_language_model(self) -> bool:
        """Whether it reads tokens."""
        return self.reads is DataSizes

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


_models: Registry[ModelEntry] = Registry("model", "recurra.models", "recurra.video")


def register_model(name: str, *, config: type[ModelConfig], reads: type = DataSizes) -> Callable[[_Class], _Class]:
    """Register a model class under `name`; it is called as `cls(config)`.

    The name is in lower case with hyphens, and `reads` is `DataSizes` or `VideoSizes`.
    """

    def register(model: _Class) -> _Class:
        _models.register(name)(ModelEntry(name, reads, config, model))
        return model

    return register


def list_models(reads: type | None = None) -> list[ModelEntry]:
    """List the entries of all registered models, or only of those that read `DataSizes` or `VideoSizes`."""
    entries = [_models[name] for name in _models]
    return [entry for entry in entries if reads is None or entry.reads is reads]


def find_model(name: str) -> ModelEntry:
    """Return the entry of a model by name. Raises ValueError, with the valid names, if there is none."""
    return _models[name]


def entry_of(model: nn.Module) -> ModelEntry:
    """Return the entry of a model. Raises TypeError if its class is not registered."""
    for entry in list_models():
        if type(model) is entry.model:
            return entry
    known = ", ".join(entry.model.__name__ for entry in list_models())
    raise TypeError(f"model is a {type(model).__name__}; expected one of {known}")
