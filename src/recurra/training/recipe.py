"""Recipes: experiments as YAML files, with overrides from the command line.

The configurations of an experiment's sections are the grammar: fields are keys, types say which values are allowed, and
docstrings are the help. Unknown keys are refused.
"""

import copy
import difflib
from argparse import SUPPRESS
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from recurra.checks import require, sentence
from recurra.files.reading import one_line, parse_yaml
from recurra.training.experiment import Experiment, sections_of, to_plain
from recurra.training.recipe_family import read_recipe
from recurra.training.recipe_files import RecipeError
from recurra.training.task import experiment_names

set_parsing_settings(docstring_parse_attribute_docstrings=True)

_parsers: dict[str, ArgumentParser] = {}  # making one, from signatures and docstrings, takes longer than parsing


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Experiment:
    """Read a recipe and apply overrides.

    Args:
        path: a YAML file with the key `experiment` and any keys of that experiment, the name of a recipe that comes
            with Recurra (`recipe_names`), or either with #VARIANT for a variant of a family.
        overrides: command line words such as ["--training.epochs", "2", "--model.dropout=0.1"]; they win
            over the recipe, and later ones win over earlier ones.

    Raises:
        RecipeError: the file cannot be read, a key is unknown, or a value is not allowed.
    """
    recipe = read_recipe(path)
    name = _checked_name(path, recipe, overrides)
    if name not in _parsers:
        _parsers[name] = _parser(name)
    parser = _parsers[name]
    try:
        # The recipe comes first, so that overrides win over it wherever they stand on the command line.
        tree, words = _with_entries(recipe, overrides, set(recipe_keys(name)))
        values = parser.instantiate(parser.parse_args(["--recipe", yaml.safe_dump(tree, sort_keys=False), *words]))
        return Experiment(**{field.name: values[field.name] for field in fields(Experiment)})
    except (ArgumentError, ValueError, TypeError) as error:
        raise RecipeError(f"{path}: {one_line(error)}") from error


def recipe_help(path: Path | str) -> str:
    """Describe every key of a recipe's experiment: its type, its value in the recipe and its meaning.

    Raises:
        RecipeError: as `load_recipe`.
    """
    recipe = read_recipe(path)
    name = _checked_name(path, recipe, ())
    parser = _parser(name)
    parser.set_defaults(dict(_values(recipe, recipe_keys(name))))
    return parser.format_help()


def to_yaml(experiment: Experiment) -> str:
    """Write the complete experiment as a recipe."""
    return yaml.safe_dump(to_plain(experiment), sort_keys=False, allow_unicode=True)


def _checked_name(path: Path | str, recipe: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """Return the experiment's name, all of whose keys in the recipe and the overrides are known."""
    name, names = recipe.get("experiment"), experiment_names()
    if name not in names:
        raise RecipeError(f"{path}: {sentence('experiment', repr(name), 'one of ' + ', '.join(names))}")
    known = set(recipe_keys(name))
    for key, value in _leaves(recipe):
        _require_known(path, key, known)
        if value != {} and any(other.startswith(key + ".") for other in known):
            raise RecipeError(f"{path}: {sentence(key, repr(value), 'a section with keys and values')}")
    for word in overrides:
        if word.startswith("--"):
            _require_known(path, word[2:].partition("=")[0].rstrip("+"), known)
    return name


def recipe_keys(name: str) -> Iterator[str]:
    """Yield the dotted names of all values of an experiment."""
    sections = sections_of(name)
    for own in fields(Experiment):
        if own.name in sections:
            yield from (f"{own.name}.{field.name}" for field in fields(sections[own.name]))
        else:
            yield own.name


def _parser(name: str) -> ArgumentParser:
    """Make a parser for the keys of an experiment."""
    parser = ArgumentParser(
        prog="recurra train RECIPE", default_env=False, exit_on_error=False, add_help=False, print_config=None
    )
    parser.add_argument("--recipe", action="config", help=SUPPRESS)
    parser.add_argument("--experiment", type=Literal[name], default=name, help="The kind of data and the model.")
    parser.add_argument(
        "--init_from",
        type=str | None,
        default=None,
        help="Start from these weights instead of fresh ones: the folder of a run (its best checkpoint), a checkpoint, "
        "or published weights that the task reads. A resumed run continues with its own weights.",
    )
    for section, config in sections_of(name).items():
        parser.add_class_arguments(config, section)
    return parser


def _with_entries(
    recipe: Mapping[str, Any], overrides: Sequence[str], known: set[str]
) -> tuple[dict[str, Any], list[str]]:
    """Apply overrides that reach two or more levels into a free dictionary, such as model.mixer_options.ring.r_min.

    The parser itself handles one level; it would leave the values of deeper entries as strings.

    Returns:
        the recipe with those overrides applied, and the words that are left.

    Raises:
        ValueError: one reaches into what an earlier word sets as a whole, which the parser would set again, or has no
            value.
    """
    tree, rest, words, whole = copy.deepcopy(dict(recipe)), [], iter(overrides), set()
    for word in words:
        key, equals, value = word.partition("=")
        *path, field = key.removeprefix("--").split(".")
        if not word.startswith("--") or not any(".".join(path[:n]) in known for n in range(1, len(path))):
            rest.append(word)
            whole |= {key} if word.startswith("--") else set()
            continue
        for n in range(1, len(path) + 1):
            before = f"--{'.'.join(path[:n])}"
            require(before not in whole, key, f"after {before}", f"inside of the value of {before}")
        inside: Any = tree
        for name in path:
            inside = inside.setdefault(name, {})
            if not isinstance(inside, dict):
                raise ValueError(sentence(name, repr(inside), f"keys and values, for {key} to be one of them"))
        given = value if equals else next(words, None)
        if given is None:
            raise ValueError(sentence(key, "the last word", "a value after it"))
        inside[field] = parse_yaml(given, f"--{key}")
    return tree, rest


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _values(tree: Mapping[str, Any], keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield those of the dotted `keys` that `tree` sets, with their values."""
    for key in keys:
        section, _, field = key.rpartition(".")
        inside = tree.get(section, {}) if section else tree
        if field in inside:
            yield key, inside[field]


def _require_known(path: Path | str, key: str, known: set[str]) -> None:
    # With a known key above it, it is an entry of a free dictionary such as model.mixer_options; below it, a section.
    if any(key == other or key.startswith(other + ".") or other.startswith(key + ".") for other in known):
        return
    section = key.partition(".")[0] + "."
    beside = {other for other in known if other.startswith(section)} or {other.partition(".")[0] for other in known}
    close = difflib.get_close_matches(key, known, n=1)
    mend = f"did you mean {close[0]}?" if close else ""
    raise RecipeError(f"{path}: {sentence(key, 'an unknown key', 'one of ' + ', '.join(sorted(beside)), mend)}")
