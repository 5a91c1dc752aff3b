"""Recipe families: many recipes in one file, a row of a table each.

A family names its axes and what each choice on an axis sets:

    common: {...}                              # keys of every row
    axes:
      model:
        transformer: {experiment: text-transformer-xl, model: {mem_len: 0}}
        crt-gru: {experiment: text-crt}
      layers:
        3-layers: {model: {n_layer: 3}}
      segment:
        n70: {data: {segment_length: 70}}
        n35: {data: {segment_length: 35}}
    published:                                 # what papers report of a row
      crt-gru-3-layers-n35: {test_perplexity: 61.0, table: 9}

A row has one choice of every axis; its name joins them in order, and FILE#crt-gru-3-layers-n35 is its recipe: the
common keys, then those of its choices, the later ones winning.
"""

import difflib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_SECTIONS = ("common", "axes", "published")


class RecipeError(ValueError):
    """A recipe, or a value set over it, that makes no experiment; the message names the file and the key."""


@dataclass(frozen=True)
class RecipeFamily:
    """A family's rows: what each sets, and what was published of it."""

    path: Path
    rows: dict[str, dict[str, Any]]
    published: dict[str, dict[str, Any]]

    def row(self, name: str) -> dict[str, Any]:
        """The recipe of a row.

        Raises:
            RecipeError: there is no such row.
        """
        if name not in self.rows:
            close = difflib.get_close_matches(name, self.rows, n=3)
            question = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(self.rows)}"
            raise RecipeError(f"{self.path} has no row {name!r}; {question}")
        return self.rows[name]


def split_row(word: str | Path) -> tuple[Path, str | None]:
    """Part FILE#ROW into its two; a file whose own name has a # in it is found as it is."""
    path = Path(word)
    name, hash_sign, row = path.name.rpartition("#")
    if not hash_sign or path.exists():
        return path, None
    return path.with_name(name), row


def read_recipe(word: str | Path) -> dict[str, Any]:
    """The keys and values of a recipe FILE, or of FILE#ROW.

    Raises:
        RecipeError: the file cannot be read, is a family and no row is named, or the other way round.
    """
    path, row = split_row(word)
    content = _read(path)
    if not is_family(content):
        if row is not None:
            raise RecipeError(f"{path} is one recipe and has no rows; give it without #{row}")
        return content
    family = _family(path, content)
    if row is None:
        raise RecipeError(
            f"{path} holds {len(family.rows)} recipes; name one as in {path}#{next(iter(family.rows))}. "
            f"There are: {', '.join(family.rows)}"
        )
    return family.row(row)


def read_family(path: str | Path) -> RecipeFamily:
    """Read a family.

    Raises:
        RecipeError: the file cannot be read, or is no family.
    """
    path = Path(path)
    content = _read(path)
    if not is_family(content):
        raise RecipeError(f"{path} is one recipe, not a family: it has no axes")
    return _family(path, content)


def is_family(content: Mapping[str, Any]) -> bool:
    """Whether the content of a file is a family's."""
    return "axes" in content


def _read(path: Path) -> dict[str, Any]:
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    if not isinstance(recipe, dict):
        raise RecipeError(f"{path}: a recipe holds keys and values, got {type(recipe).__name__}")
    return recipe


def _family(path: Path, content: Mapping[str, Any]) -> RecipeFamily:
    if unknown := [key for key in content if key not in _SECTIONS]:
        raise RecipeError(f"{path}: unknown key {unknown[0]}; a family has: {', '.join(_SECTIONS)}")
    axes = content["axes"]
    if not _is_tree(axes, depth=3) or not axes:
        raise RecipeError(f"{path}: axes must hold, for each axis, its choices and what each of them sets")
    common, published = content.get("common", {}), content.get("published", {})
    if not isinstance(common, dict) or not _is_tree(published, depth=2):
        raise RecipeError(f"{path}: common must hold a recipe's keys, and published the figures of each row")
    rows = {}
    for choices in itertools.product(*(axis.items() for axis in axes.values())):
        recipe: dict[str, Any] = dict(common)
        for _, settings in choices:
            recipe = _merged(recipe, settings)
        rows["-".join(name for name, _ in choices)] = recipe
    if unknown := [name for name in published if name not in rows]:
        raise RecipeError(f"{path}: published names {unknown[0]!r}, which is no row; there are: {', '.join(rows)}")
    return RecipeFamily(path, rows, dict(published))


def _is_tree(value: Any, depth: int) -> bool:
    """Whether `value` is dictionaries with names for keys, so many levels down."""
    if depth == 0:
        return True
    return isinstance(value, dict) and all(isinstance(k, str) and _is_tree(v, depth - 1) for k, v in value.items())


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged
