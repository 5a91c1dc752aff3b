"""`recurra table`: list the recipes of a family, what was published of them, and what finished runs measured."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Column, Table

from recurra.checks import sentence
from recurra.cli.arguments import command_parser
from recurra.runs.departures import departures
from recurra.runs.score_files import find_scores, score_file, staleness
from recurra.runs.start import default_run_folder
from recurra.training import RecipeError, RecipeFamily, RunFolder, read_family


class Score(NamedTuple):
    """A score that papers report.

    title: its name in a table. measured: its key in what `recurra eval` writes. factor: to the table's unit.
    """

    title: str
    measured: str
    factor: float = 1.0


SCORES = {
    "test_perplexity": Score("Test perplexity", "perplexity"),
    "test_accuracy": Score("Test accuracy, per cent", "accuracy", 100.0),
    "test_scaled_accuracy": Score("Test accuracy above chance, per cent", "scaled_accuracy", 100.0),
    "test_mean_class_accuracy": Score("Test mean class accuracy, per cent", "mean_class_accuracy", 100.0),
}
"""By their keys in the published figures of a family, which has one of them, or none."""
MONITORED = "test_accuracy"
"""The score of a family without published figures whose runs keep the checkpoint of the best accuracy."""


def run(words: Sequence[str]) -> int:
    """Print a table."""
    parser = command_parser(
        "table",
        (
            "List the recipes of a family with their published and measured test scores, and in what the measured runs "
            "depart from their recipes."
        ),
        overrides=False,
    )
    parser.add_argument("family", metavar="FILE", help="a family of recipes, such as ptb/transformers")
    parser.add_argument("--number", type=int, metavar="N", help="only the rows of the paper's table N")
    arguments = parser.parse_args(words)
    family = read_family(arguments.family)
    key = _score_of(family)
    recipes, departing = (Column(heading, overflow="fold") for heading in ("recipe", "the run departs in"))
    table = Table(recipes, "tables", "published", "measured", departing, title=SCORES[key].title)
    for name in family.variants:
        published = family.published.get(name, {})
        tables = published.get("tables", [])
        if arguments.number is not None and arguments.number not in tables:
            continue
        recipe = f"{family.path}#{name}"
        folder = RunFolder(default_run_folder(recipe))
        measured, notes = _measured(folder, SCORES[key])
        unlike = [] if measured is None else [*departures(folder, recipe), *notes]
        cells = ["" if cell is None else f"{cell:.1f}" for cell in (published.get(key), measured)]
        table.add_row(name, ", ".join(map(str, tables)), *cells, "\n".join(unlike))
    if not table.row_count:
        known = sorted({number for figures in family.published.values() for number in figures.get("tables", [])})
        raise RecipeError(sentence("--number", str(arguments.number), f"a table in {family.path}: one of {known}"))
    Console(markup=False).print(table)
    return 0


def _score_of(family: RecipeFamily) -> str:
    """A key of `SCORES`: that of the published figures, or else what the family's first recipe monitors."""
    reported = {key for figures in family.published.values() for key in figures}
    first = next(iter(family.variants.values()), {})
    monitored = first.get("training", {}).get("monitor") == "accuracy"
    return next((key for key in SCORES if key in reported), MONITORED if monitored else "test_perplexity")


def _measured(folder: RunFolder, score: Score) -> tuple[float | None, list[str]]:
    """Read what `recurra eval` wrote into a run's folder, and what to know of it; None if it wrote nothing."""
    if not score_file(folder, "test", {}).is_file():
        return None, []
    found = find_scores(folder, "test", {}, score.measured)
    which = found.get("checkpoint", "best")
    notes = [] if which == "best" else [f"checkpoint: {which}"]
    return score.factor * float(found[score.measured]), [*notes, *filter(None, [staleness(folder, found)])]
