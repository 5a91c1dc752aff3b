"""Where things are on a machine: the owner's own business, which no summary and no command tells."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

FOLDERS = ("data.path", "data.poses")
"""What a command has to name, by the dotted keys of a recipe."""
PLACES = (*FOLDERS, "data.cache", "data.tokenizer")
"""These, and what a command can leave out."""


def without_outer_places(config: Any) -> Any:
    """Replace each path that leads out of the working folder by its bare name, the keys of mappings included."""
    if isinstance(config, Mapping):
        found: dict[Any, Any] = {}
        for key, value in config.items():
            name = without_outer_places(key)
            if name in found:  # two folders of one name
                name = f"{name}-{len(found) + 1}"
            found[name] = without_outer_places(value)
        return found
    if isinstance(config, list):
        return [without_outer_places(value) for value in config]
    if isinstance(config, str) and (PurePath(config).is_absolute() or config.startswith(("..", "~"))):
        return PurePath(config).name
    return config
