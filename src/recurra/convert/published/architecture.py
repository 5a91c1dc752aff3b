"""The published architectures that can be converted, by the model_type of their config.json."""

from collections.abc import Callable
from typing import Any, NamedTuple

from recurra.convert.published.fused import Fused
from recurra.convert.published.rules import Rule
from recurra.convert.published.settings import Settings
from recurra.models import LanguageModelConfig


class Architecture(NamedTuple):
    """What a converter knows of a published architecture.

    model_type: its name in config.json.
    class_name: transformers' class.
    mixer: the mixer here that it is known by.
    config: makes the model's shape from config.json.
    rules: the weights, for a shape.
    settings: makes the entries of config.json from a shape, for the way back.
    fits: whether a shape with that mixer is of this architecture, where several have the mixer.
    head: the output matrix there, which a folder omits if it is the embedding.
    fused: matrices there that are split before the rules see them, for a shape.
    """

    model_type: str
    class_name: str
    mixer: str
    config: Callable[[Settings], LanguageModelConfig]
    rules: Callable[[LanguageModelConfig], list[Rule]]
    settings: Callable[[LanguageModelConfig], dict[str, Any]]
    fits: Callable[[LanguageModelConfig], bool] = lambda config: True
    head: str = "lm_head.weight"
    fused: Callable[[LanguageModelConfig], list[Fused]] = lambda config: []


ARCHITECTURES: dict[str, Architecture] = {}
"""The architectures by model_type."""


def register_architecture(architecture: Architecture) -> None:
    """Make an architecture known."""
    ARCHITECTURES[architecture.model_type] = architecture
