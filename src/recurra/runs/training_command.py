"""The command that trains a run again, found by comparing its configuration with the recipes."""

import json
import shlex
from pathlib import Path
from typing import Any

from recurra.runs.places import FOLDERS, PLACES, without_outer_places
from recurra.runs.start import default_run_folder
from recurra.training import Experiment, RecipeError, load_recipe, read_family
from recurra.training.experiment import differences, flat, to_plain
from recurra.training.recipe_family import read_recipe

OPEN = {"training.precision": "auto"}
"""Values that a recipe leaves to the machine. A run has what was chosen."""


def training_command(name: str, experiment: Experiment, recipes: Path) -> str:
    """Write `recurra train` with the recipe nearest to a run, and every value in which the run differs.

    Args:
        name: the run's.
        experiment: what the run's config.yaml says.
        recipes: the folder of recipes, with a folder for each subject.

    Returns:
        a command that makes the recipe this very experiment, apart from the places of its data; if no recipe can be
        made so, the command for the run's config.yaml.
    """
    trained = to_plain(experiment)
    for word in _nearest_first(trained, recipes)[:1]:
        changes = differences(to_plain(load_recipe(word)), trained)
        words = [part for key, (_, value) in changes.items() for part in (f"--{key}", as_word(value))]
        try:
            again = to_plain(load_recipe(word, words))
        except RecipeError:
            continue
        if again == trained:
            return " ".join(["recurra train", _shown(word, recipes), *_arguments(changes), *_run_folder(name, word)])
    return f"recurra train config.yaml --run runs/{name}"


def _nearest_first(trained: dict[str, Any], recipes: Path) -> list[str]:
    """The recipes of the same experiment: those with the fewest different values first, then the most detailed."""
    values = dict(flat(trained))
    ranks = []
    for path in sorted(recipes.glob("*/*.yaml")):
        for word, recipe in _recipes_of(path):
            if recipe.get("experiment") == trained["experiment"]:
                own = {key: value for key, value in flat(recipe) if key not in PLACES}
                n_equal = sum(value in (values.get(key), OPEN.get(key)) for key, value in own.items())
                ranks.append((len(own) - n_equal, -n_equal, word))
    return [word for *_, word in sorted(ranks)]


def _recipes_of(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The recipes of a file by the words that name them: one, or the variants of a family."""
    try:
        return [(str(path), read_recipe(path))]
    except RecipeError:
        return [(f"{path}#{variant}", recipe) for variant, recipe in read_family(path).variants.items()]


def as_word(value: Any) -> str:
    """Write a value of a configuration as a word of a command."""
    return value if isinstance(value, str) else json.dumps(value)


def _arguments(changes: dict[str, tuple[Any, Any]]) -> list[str]:
    words = []
    for key, (_, value) in changes.items():
        if key in FOLDERS:
            words.append(f"--{key} FOLDER")
        elif key not in PLACES:
            words.append(f"--{key} {shlex.quote(as_word(without_outer_places(value)))}")
    return words


def _shown(word: str, recipes: Path) -> str:
    return f"recipes/{Path(word).relative_to(recipes).as_posix()}"


def _run_folder(name: str, word: str) -> list[str]:
    return [] if default_run_folder(word).name == name else [f"--run runs/{name}"]
