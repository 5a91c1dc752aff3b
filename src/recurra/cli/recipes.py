"""`recurra recipes`: list the recipes that come with Recurra, or print one."""

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recurra.cli.arguments import command_parser
from recurra.files.reading import read_text, read_yaml
from recurra.train.recipe import find_recipe, recipe_names

_WIDTH = 120
"""Columns of the table if the output is not a terminal."""


def run(words: Sequence[str]) -> int:
    """Print a table of all recipes, or the text of one."""
    parser = command_parser(
        "recipes",
        "List the recipes that come with Recurra: `recurra train NAME` trains one. With a NAME, print that recipe; to "
        "change it, write it into a file of your own, `recurra recipes NAME > mine.yaml`.",
        overrides=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe to print, such as ptb/gateloop")
    name = parser.parse_args(words).name
    if name is not None:
        print(read_text(find_recipe(name)), end="")
        return 0
    console = Console(markup=False)
    if not console.is_terminal:
        console = Console(width=_WIDTH, markup=False)
    console.print(_table())
    return 0


def _table() -> Table:
    table = Table("name", "variants", "what it is")
    for name in recipe_names():
        path = find_recipe(name)
        axes = read_yaml(path).get("axes", {})  # of a family
        table.add_row(name, str(math.prod(map(len, axes.values()))) if axes else "", _first_sentence(path))
    return table


def _first_sentence(path: Path) -> str:
    """Return the first sentence of the comment that a recipe begins with."""
    comment = itertools.takewhile(lambda line: line.strip("# "), read_text(path).splitlines())
    return re.split(r"(?<!et al)\. ", " ".join(line.removeprefix("# ") for line in comment))[0].rstrip(".")
