"""The registry of mixers."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from recurra.mixers.base import Mixer
from recurra.registry import Registry

_mixers: Registry[type[Mixer]] = Registry("mixer", "recurra.mixers")
_Class = TypeVar("_Class", bound=type[Mixer])


def register_mixer(name: str) -> Callable[[_Class], _Class]:
    """Register a mixer class under `name`; it is called as `cls(d_model, **options)`.

    From then on the language model, the recipes, the exports and the contract tests know it.
    """
    return _mixers.register(name)  # type: ignore[return-value]


def list_mixers() -> list[str]:
    """List the names of all registered mixers."""
    return list(_mixers)


def create_mixer(name: str, d_model: int, **options: Any) -> Mixer:
    """Create a mixer by name.

    Args:
        name: one of `list_mixers()`.
        d_model: channels of its input and output.
        options: keyword arguments of its class.

    Raises:
        ValueError: the name or an option is unknown; the message lists those that exist.
    """
    allowed = mixer_options(name)
    unknown = [option for option in options if option not in allowed]
    if unknown:
        raise ValueError(f"mixer {name!r} has no option {', '.join(unknown)}; expected one of {', '.join(allowed)}")
    return _mixers[name](d_model, **options)


def mixer_options(name: str) -> dict[str, Any]:
    """Return the options of a mixer with their defaults."""
    parameters = inspect.signature(_mixers[name]).parameters
    return {option: parameter.default for option, parameter in parameters.items() if option != "d_model"}
