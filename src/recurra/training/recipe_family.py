"""Recipe families: many recipes in one file, each a variant of the others.

A family names its axes and what each choice on an axis sets:

    common: {...}                              # keys of every variant
    axes:
      model:
        transformer: {experiment: text-transformer-xl, model: {mem_len: 0}}
        crt-gru: {experiment: text-crt}
      layers:
        3-layers: {model: {n_layer: 3}}
      segment:
        n70: {data: {segment_length: 70}}
        n35: {data: {segment_length: 35}}

A variant makes one choice on every axis, and its name joins those choices in order. FILE#crt-gru-3-layers-n35 is its
recipe: the common keys, then the keys of its choices. Later keys win.
"""

import difflib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recurra.checks import sentence
from recurra.files.reading import read_yaml
from recurra.training.recipe_files import RecipeError, find_recipe

_SHOWN = 300  # characters of a value in a message
_SECTIONS = ("common", "axes")


@dataclass(frozen=True)
class RecipeFamily:
    """The variants of a family by name: what each sets."""

    path: Path
    variants: dict[str, dict[str, Any]]

    def variant(self, name: str) -> dict[str, Any]:
        """Return the recipe of a variant.

        Raises:
            RecipeError: the family has no such variant.
        """
        if name not in self.variants:
            close = difflib.get_close_matches(name, self.variants, n=3)
            mend = f"did you mean {' or '.join(close)}?" if close else ""
            raise RecipeError(sentence(f"the variant of {self.path}", repr(name), _one_of(self.variants), mend))
        return self.variants[name]


def split_variant(word: str | Path) -> tuple[Path, str | None]:
    """Split FILE#VARIANT into its two parts; an existing file with a # in its own name is left whole."""
    path = Path(word)
    name, hash_sign, variant = path.name.rpartition("#")
    if not hash_sign or path.exists():
        return path, None
    return path.with_name(name), variant


def read_recipe(word: str | Path) -> dict[str, Any]:
    """Read the keys and values of a recipe, FILE or FILE#VARIANT; FILE is a path or a name (see `find_recipe`).

    Raises:
        RecipeError: the file cannot be found or read, or it is a family and no variant is named, or the other way
            round.
    """
    path, variant = split_variant(word)
    path = find_recipe(path)
    content = _read(path)
    if not is_family(content):
        if variant is not None:
            raise RecipeError(
                sentence("recipe", word, f"{path} without #{variant}", "the file is one recipe and has no variants")
            )
        return content
    family = _family(path, content)
    if variant is None:
        raise RecipeError(
            sentence(
                "recipe",
                f"{path}, a family of {len(family.variants)} recipes",
                f"one of its variants, as in {path}#{next(iter(family.variants))}",
                f"there are {', '.join(family.variants)}",
            )
        )
    return family.variant(variant)


def read_family(path: str | Path) -> RecipeFamily:
    """Read a family, a path or a name (see `find_recipe`).

    Raises:
        RecipeError: the file cannot be found or read, or is not a family.
    """
    path = find_recipe(path)
    content = _read(path)
    if not is_family(content):
        raise RecipeError(sentence("family", f"{path}, one recipe without axes", "a recipe family"))
    return _family(path, content)


def is_family(content: Mapping[str, Any]) -> bool:
    """Tell whether the content of a recipe file is a family."""
    return "axes" in content


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_yaml(path, "the recipe")
    except OSError as error:
        raise RecipeError(sentence("recipe", f"{path}, which cannot be read ({error})", "a YAML file")) from error
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _family(path: Path, content: Mapping[str, Any]) -> RecipeFamily:
    def require(condition: bool, name: str, came: str, expected: str) -> None:
        if not condition:
            came = came if len(came) <= _SHOWN else f"{came[:_SHOWN]}..."
            raise RecipeError(f"{path}: {sentence(name, came, expected)}")

    for key in content:
        require(key in _SECTIONS, key, "an unknown key", f"only {', '.join(_SECTIONS)}")
    axes, common = content["axes"], content.get("common", {})
    is_table = bool(axes) and _is_tree(axes, depth=3)
    require(is_table, "axes", repr(axes), "the choices on each axis, and the keys that each choice sets")
    require(isinstance(common, dict), "common", repr(common), "the keys and values of a recipe")
    variants = {}
    for choices in itertools.product(*(axis.items() for axis in axes.values())):
        recipe: dict[str, Any] = dict(common)
        for _, settings in choices:
            recipe = _merged(recipe, settings)
        variants["-".join(name for name, _ in choices)] = recipe
    return RecipeFamily(path, variants)


def _is_tree(value: Any, depth: int) -> bool:
    """Tell whether `value` is dictionaries with strings as keys, nested `depth` levels deep."""
    if depth == 0:
        return True
    return isinstance(value, dict) and all(isinstance(k, str) and _is_tree(v, depth - 1) for k, v in value.items())


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _one_of(names: Mapping[str, Any]) -> str:
    return f"one of {', '.join(names)}"
