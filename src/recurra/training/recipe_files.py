"""Where recipes are: a path, or the name of one that comes with Recurra, such as memory-horizon/data-controlled."""

import difflib
from pathlib import Path

from recurra.checks import sentence

_PACKAGE = Path(__file__).resolve().parents[1]
_IN_WHEEL, _IN_CLONE = _PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes"
_NEAR = 3  # names that a message offers


class RecipeError(ValueError):
    """A recipe, or a value set over it, that makes no experiment; the message names the file and the key."""


def recipes_folder() -> Path:
    """Locate the recipes that come with Recurra: inside an installed package, beside `src` in a clone.

    Raises:
        FileNotFoundError: there are none; the installation is not complete.
    """
    for folder in (_IN_WHEEL, _IN_CLONE):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(sentence("recipes", f"{_IN_WHEEL}, which does not exist", "a folder", "reinstall Recurra"))


def recipe_names() -> list[str]:
    """List the names of the recipes that come with Recurra, FOLDER/NAME each, in alphabetical order."""
    folder = recipes_folder()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.yaml"))


def find_recipe(word: Path | str) -> Path:
    """Find a recipe's file.

    Args:
        word: the path of a file, which wins if it exists, or the name of a recipe that comes with Recurra. A name may
            also be written as its path in a clone, recipes/NAME.yaml.

    Raises:
        RecipeError: it is neither; the message offers names that are near.
    """
    path = Path(word)
    if path.exists() and not path.is_dir():
        return path
    name = path.as_posix().removeprefix("recipes/").removesuffix(".yaml")
    names = recipe_names()
    if name in names:
        return recipes_folder() / f"{name}.yaml"
    near = _near(name, names)
    mend = f"did you mean {' or '.join(near)}?" if near else "`recurra recipes` lists the names"
    came = f"{word}, which is neither a file nor the name of a recipe"
    raise RecipeError(sentence("recipe", came, "a YAML file, or the name of a recipe that comes with Recurra", mend))


def _near(name: str, names: list[str]) -> list[str]:
    """The names most like `name`: recipes of the folder that it is, else those that are spelt almost so."""
    within = [other for other in names if other.startswith(f"{name.rstrip('/')}/") or other.endswith(f"/{name}")]
    return within[:_NEAR] or difflib.get_close_matches(name, names, n=_NEAR)
