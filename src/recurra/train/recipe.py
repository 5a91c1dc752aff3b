"""Recipes: experiments as YAML files, families of variants in one file, and overrides from the command line.

`load_recipe` turns a file into an `Experiment`; `Experiment.build_model` creates its model.
"""

import copy
import itertools
import re
import warnings
from argparse import SUPPRESS
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from recurra._choices import recipe_names, recipes_folder
from recurra._files.reading import one_line, parse_yaml, read_yaml
from recurra._process import is_first_launched
from recurra.checks import require, sentence
from recurra.models.language_model import LanguageModelConfig
from recurra.registry import did_you_mean, near
from recurra.train._mixer_options import follow_mixer
from recurra.train.experiment import Experiment, flat, sections_of, to_plain
from recurra.train.task import experiment_names


class RecipeError(ValueError):
    """A recipe or an override is not a valid experiment; the message names the file and the key."""


def find_recipe(word: Path | str) -> Path:
    """Find a recipe's file.

    Args:
        word: the path of a file, which takes precedence if it exists, or the name of a recipe in the package. A name
            can also be written as its path in a clone, recipes/NAME.yaml, or as its folder if that has only one recipe.

    Raises:
        RecipeError: it is neither; the message suggests similar names.
    """
    path = Path(word)
    if path.exists() and not path.is_dir():
        return path
    name = path.as_posix().removeprefix("recipes/").removesuffix(".yaml")
    names = recipe_names()
    if name in names:
        return recipes_folder() / f"{name}.yaml"
    inside = [other for other in names if other.startswith(f"{name.rstrip('/')}/")]
    if len(inside) == 1:
        return recipes_folder() / f"{inside[0]}.yaml"
    within = inside + [other for other in names if other.endswith(f"/{name}")]
    near = did_you_mean(name, names) or did_you_mean(name, {other.partition("/")[0] for other in names})
    hint = f"did you mean {' or '.join(within[:3])}?" if within else near
    hint = hint or "`recurra recipes` lists the names"
    got = f"{word}, which is neither a file nor the name of a recipe"
    raise RecipeError(sentence("recipe", got, "a YAML file, or the name of a recipe that comes with Recurra", hint))


@dataclass(frozen=True)
class RecipeFamily:
    """The variants of a family (many recipes in one file), by name, with their settings.

    A family lists its axes and the settings of each choice on an axis, such as {common: {data: {path: here}}, axes:
    {model: {crt: {experiment: text-crt}}, layers: {3-layers: {model: {n_layer: 3}}}}}. A variant makes one choice on
    every axis, and its name joins them: FILE#crt-3-layers has the common keys, then those of its choices. Later keys
    take precedence. If a later key replaces a mixer, the options that the new mixer supports remain.
    """

    path: Path
    variants: dict[str, list[dict[str, Any]]]

    def variant(self, name: str) -> dict[str, Any]:
        """Return the recipe of a variant. Raises RecipeError: the family has no such variant."""
        if name not in self.variants:
            hint = did_you_mean(name, self.variants)
            one, expected = f"the variant of {self.path}", f"one of {', '.join(self.variants)}"
            raise RecipeError(sentence(one, repr(name), expected, hint))
        recipe: dict[str, Any] = {}
        for settings in self.variants[name]:
            try:
                recipe = _merged(_with_mixer_of(settings.get("model", {}), recipe), settings)
            except (TypeError, ValueError) as error:
                raise RecipeError(f"{self.path}#{name}: {one_line(error)}") from error
        return recipe


def split_variant(word: str | Path) -> tuple[Path, str | None]:
    """Split FILE#VARIANT into its two parts; an existing file with a # in its name is not split."""
    path = Path(word)
    name, hash_sign, variant = path.name.rpartition("#")
    if not hash_sign or path.exists():
        return path, None
    return path.with_name(name), variant


def _read_recipe(word: str | Path) -> dict[str, Any]:
    """Read the keys and values of a recipe, FILE or FILE#VARIANT; FILE is a path or a name (see `find_recipe`)."""
    path, variant = split_variant(word)
    content = _read(find_recipe(path))
    if "axes" not in content:
        if variant is not None:
            hint = "the file is one recipe and has no variants"
            raise RecipeError(sentence("recipe", word, f"{path} without #{variant}", hint))
        return content
    family = _family(path, content)
    if variant is None:
        got = f"{path}, a family of {len(family.variants)} recipes"
        expected = f"one of its variants, as in {path}#{next(iter(family.variants))}"
        raise RecipeError(sentence("recipe", got, expected, f"there are {', '.join(family.variants)}"))
    return family.variant(variant)


def read_family(path: str | Path) -> RecipeFamily:
    """Read a family, a path or a name (see `find_recipe`). Raises RecipeError."""
    content = _read(find_recipe(path))
    if "axes" not in content:
        raise RecipeError(sentence("family", f"{path}, one recipe without axes", "a recipe family"))
    return _family(Path(path), content)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_yaml(path, "the recipe")
    except OSError as error:
        raise RecipeError(sentence("recipe", f"{path}, which cannot be read ({error})", "a YAML file")) from error
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _family(path: Path, content: Mapping[str, Any]) -> RecipeFamily:
    axes, common = content["axes"], content.get("common", {})
    wrong = ""
    if unknown := [key for key in content if key not in ("common", "axes")]:
        wrong = sentence(unknown[0], "an unknown key", "only common, axes")
    elif not axes or not _is_tree(axes, depth=3):
        wrong = sentence("axes", repr(axes), "the choices on each axis, and the keys that each choice sets")
    elif not isinstance(common, dict):
        wrong = sentence("common", repr(common), "the keys and values of a recipe")
    if wrong:
        raise RecipeError(f"{path}: {wrong}")
    variants = {}
    for choices in itertools.product(*(axis.items() for axis in axes.values())):
        variants["-".join(name for name, _ in choices)] = [common, *(settings for _, settings in choices)]
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


# The fields of configurations are keys, their types say what is allowed, and docstrings are the help.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Experiment:
    """Read a recipe and apply overrides.

    Args:
        path: a YAML file with the key `experiment` and any keys of that experiment, the name of a recipe in the package
            (`recipe_names`), or either with #VARIANT for a variant of a family.
        overrides: command-line words such as ["--training.epochs", "2", "--model.dropout=0.1"]. They take precedence
            over the recipe, and later ones over earlier ones. A different mixer keeps the recipe's mixer_options that
            it supports; a warning lists the others.

    Raises:
        RecipeError: the file cannot be read, a key is unknown, or a value is not allowed.
    """
    recipe = _read_recipe(path)
    name = _checked_name(path, recipe, overrides)
    parser = _cached_parser(name)
    try:
        # The recipe comes first, so that overrides win over it wherever they stand on the command line.
        recipe = _with_mixer_of_overrides(name, recipe, overrides)
        tree, words = _with_entries(recipe, overrides, set(_recipe_keys(name)))
        values = parser.instantiate(parser.parse_args(["--recipe", yaml.safe_dump(tree, sort_keys=False), *words]))
        return Experiment(**{field.name: values[field.name] for field in fields(Experiment)})
    except (ArgumentError, ValueError, TypeError) as error:
        raise RecipeError(f"{path}: {_of_parser(error)}") from error


def mixer_of_recipe(path: Path | str) -> Any:
    """Return the mixer that a recipe itself says, one or a list, or its model's default; None for one without."""
    recipe = _read_recipe(path)
    return _own_model(recipe["experiment"], recipe)["mixer"]


def _own_model(name: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The section `model` of a recipe, with its mixer also if that is the default."""
    return {"mixer": getattr(sections_of(name)["model"], "mixer", None)} | recipe.get("model", {})


def as_settings(overrides: Sequence[str]) -> dict[str, str]:
    """Return the values of overrides by key, as they were written."""
    joined = iter(overrides)
    pairs = (word.removeprefix("--").partition("=") for word in joined)
    return {key: value if equals else next(joined) for key, equals, value in pairs}


def as_words(*settings: Mapping[str, str]) -> list[str]:
    """Write settings as overrides; later ones win."""
    return [f"--{key}={value}" for one in settings for key, value in one.items()]


def recipe_help(path: Path | str) -> str:
    """Describe every key of a recipe's experiment: its type, its value in the recipe and its meaning.

    Raises:
        RecipeError: as `load_recipe`.
    """
    recipe = _read_recipe(path)
    name = _checked_name(path, recipe, ())
    parser = _parser(name)
    for key in _recipe_keys(name):
        section, _, field = key.rpartition(".")
        inside = recipe.get(section, {}) if section else recipe
        if field in inside:
            parser.set_defaults({key: inside[field]})
    return parser.format_help()


def to_yaml(experiment: Experiment) -> str:
    """Write the complete experiment as a recipe."""
    return yaml.safe_dump(to_plain(experiment), sort_keys=False, allow_unicode=True)


def _checked_name(path: Path | str, recipe: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """Return the experiment's name, all of whose keys in the recipe and the overrides are known."""
    name, names = recipe.get("experiment"), experiment_names()
    if name not in names:
        hint = did_you_mean(str(name), names)
        raise RecipeError(f"{path}: {sentence('experiment', repr(name), 'one of ' + ', '.join(names), hint)}")
    known = set(_recipe_keys(name))
    overridden = {word[2:].partition("=")[0] for word in overrides if word.startswith("--")}
    for key, value in flat(recipe):
        _require_known(path, key, known)
        if value != {} and any(other.startswith(key + ".") for other in known):
            raise RecipeError(f"{path}: {sentence(key, repr(value), 'a section with keys and values')}")
        if value is None and key not in overridden:
            _require_nullable(path, key, sections_of(name))
    for word in overrides:
        if word.startswith("--"):
            _require_known(path, word[2:].partition("=")[0].rstrip("+"), known)
    return name


def _recipe_keys(name: str) -> Iterator[str]:
    """Yield the dotted names of all values of an experiment."""
    sections = sections_of(name)
    for own in fields(Experiment):
        if own.name in sections:
            yield from (f"{own.name}.{field.name}" for field in fields(sections[own.name]))
        else:
            yield own.name


def _parser(name: str) -> ArgumentParser:
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


_cached_parser = cache(_parser)  # making one, from signatures and docstrings, takes longer than parsing


def _with_mixer_of_overrides(name: str, recipe: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    keys = {word.partition("=")[0] for word in overrides}
    model = recipe.get("model", {})
    if not keys & {"--model.mixer", "--model"} or "--model.mixer_options" in keys or not model.get("mixer_options"):
        return recipe
    bare = {**recipe, "model": {key: value for key, value in model.items() if key != "mixer_options"}}
    tree, words = _with_entries(bare, overrides, set(_recipe_keys(name)))
    values = _cached_parser(name).parse_args(["--recipe", yaml.safe_dump(tree, sort_keys=False), *words])
    return _with_mixer_of(values.model.as_dict(), {**recipe, "model": _own_model(name, recipe)})


def _with_mixer_of(above: Mapping[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """Leave those `mixer_options` of a recipe that the mixer of `above`, the section `model` set over it, takes."""
    model = recipe.get("model")
    if not isinstance(model, dict) or "mixer" not in above or not model.get("mixer") or not model.get("mixer_options"):
        return recipe
    d_model = model.get("d_model", LanguageModelConfig.d_model)
    options, notes = follow_mixer(model["mixer"], model["mixer_options"], above, d_model)
    if is_first_launched():
        for note in notes:
            warnings.warn(note, stacklevel=1)
    return {**recipe, "model": {**model, "mixer_options": options}}


def _with_entries(
    recipe: Mapping[str, Any], overrides: Sequence[str], known: set[str]
) -> tuple[dict[str, Any], list[str]]:
    """Apply overrides that reach two or more levels into a free dictionary, such as model.mixer_options.ring.r_min."""
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


def _require_known(path: Path | str, key: str, known: set[str]) -> None:
    # With a known key above it, it is an entry of a free dictionary such as model.mixer_options; below it, a section.
    if any(key == other or key.startswith(other + ".") or other.startswith(key + ".") for other in known):
        return
    section, _, field = key.partition(".")
    fields_there = {other.partition(".")[2]: other for other in known if other.startswith(f"{section}.")}
    close = [fields_there[name] for name in near(field, fields_there)] or near(key, known)
    if close:
        raise RecipeError(f"{path}: {key} is an unknown key: did you mean {' or '.join(close)}?")
    beside = set(fields_there.values()) or {other.partition(".")[0] for other in known}
    raise RecipeError(f"{path}: {sentence(key, 'an unknown key', 'one of ' + ', '.join(sorted(beside)))}")


def _require_nullable(path: Path | str, key: str, sections: Mapping[str, type]) -> None:
    # The parser lets a file set any field to null.
    section, _, name = key.partition(".")
    kind = get_type_hints(sections[section]).get(name, Any) if section in sections else Any
    if kind is not Any and not {None, type(None)} & {*get_args(kind)}:
        plain = getattr(get_origin(kind) or kind, "__name__", str(kind))
        raise RecipeError(f"{path}: {sentence(key, 'null', _TYPES.get(plain, 'a value'), 'omit it for the default')}")


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "dict": "{key: value}",
    "tuple": "a list, as in [1, 2]",
    "list": "a list, as in [1, 2]",
    "NoneType": "null",
}


def _of_parser(error: Exception) -> str:
    """Say what the parser refused as the project's own checks do."""
    line = one_line(error)
    found = re.match(r'Parser key "(.+?)": .*?(?:Got value|Given value):(.*)', line)
    if not found:
        return line
    kinds = re.findall(r"Expected a (?:<class ')?(.+?)(?:'>)?(?=\.? (?:Got value|Given value|-|Expected a))", line)
    words = [_TYPES.get(kind, kind.removeprefix("typing.").replace("Literal", "one of ")) for kind in kinds]
    return sentence(found[1], found[2].strip() or "empty", " or ".join(words))
