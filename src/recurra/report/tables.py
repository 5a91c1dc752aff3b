"""The page's tables: each function returns the lines of a Markdown table."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from recurra.runs.summary import Summary
from recurra.training import RecipeFamily
from recurra.training.experiment import flat

NOTHING = "-"
IDENTITY = ("model.n_layer", "model.d_model")
"""What a run must share with a row of a family, beside what tells the family's rows apart."""


def show(number: float | None, digits: int = 0) -> str:
    """A number with so many digits after the point, thousands apart; a dash for what was not measured."""
    return NOTHING if number is None or math.isnan(number) else f"{number:,.{digits}f}"


def epochs(run: Summary) -> str:
    """How many epochs a run has; of one that is not finished how many so far."""
    if run.finished:
        return f"{run.epochs:g}"
    return f"{run.epochs:.3g} of {run.total_epochs:g}, **unfinished**"


def horizon_table(runs: Sequence[Summary], published: Mapping[str, float] = {}) -> str:
    """Runs on Memory Horizon, with accuracies. `published`: test accuracies by the run's name, a column where some are
    given.

    Raises:
        ValueError: there is no run, or a run or a published figure of something else.
    """
    require_runs(runs)
    lines = []
    for run in runs:
        if run.config["experiment"] != "memory-horizon":
            raise ValueError(f"{run.name} is a run of {run.config['experiment']}, not on Memory Horizon")
        lines.append(
            [
                run.name,
                mixer(run),
                epochs(run),
                show(run.validation.get("best", {}).get("accuracy"), 3),
                show(run.score("accuracy"), 3),
                *([show(published.get(run.name), 2)] if published else []),
                show(run.seconds / 60),
                run.precision,
                str(run.seed),
            ]
        )
    column = ["published test"] if published else []
    return markdown_table(["run", "mixer", "epochs", "valid", "test", *column, "minutes", "precision", "seed"], lines)


def measured_on(runs: Sequence[Summary]) -> str:
    """The versions and the machines that runs were trained with, in a sentence."""
    require_runs(runs)
    found = []
    for run in runs:
        software = ", ".join(f"{name} {version}" for name, version in run.versions.items())
        machine = run.hardware or {}
        words = [
            f"{machine['processor']}, {machine['threads']} of {machine['cores']} cores" if machine else "",
            machine.get("gpu") or "",
        ]
        found.append(" on ".join([software, ", ".join(word for word in words if word) or "a machine not written down"]))
    return f"Trained with {'; '.join(dict.fromkeys(found))}."


def mixer(run: Summary) -> str:
    """The mixer of a language model's blocks; of GateLoop what its transition is, too."""
    names, options = run.value("model.mixer"), run.value("model.mixer_options") or {}
    if isinstance(names, list):
        return ", ".join(names)
    return f"{names}, {options['transition']}" if "transition" in options else str(names)


def family_table(family: RecipeFamily, runs: Sequence[Summary], rows: str = "*") -> str:
    """The rows of a family that something was published of, or that some run is of, with perplexities.

    Args:
        family: the recipes, and what was published of them.
        runs: what was trained; which row a run is of follows from its configuration (see `family_row`).
        rows: a pattern of the rows to list, such as *-3-layers-*.

    Raises:
        ValueError: no row fits the pattern, or a run is of no row.
    """
    lines = []
    for row, of_row in _runs_by_row(family, runs, rows).items():
        published = show(family.published.get(row, {}).get("test_perplexity"), 1)
        for run in of_row:
            valid, test = show(run.valid_perplexity, 1), show(run.score("perplexity"), 1)
            minutes = show(run.seconds / 60)
            lines.append([row, published, test, valid, epochs(run), minutes, run.precision, str(run.seed), run.name])
        if not of_row and row in family.published:
            lines.append([row, published, "not run", *[NOTHING] * 6])
    heads = ["model", "published test", "test", "valid", "epochs", "minutes", "precision", "seed", "run"]
    return markdown_table(heads, lines)


def rows_without_runs(family: RecipeFamily, runs: Sequence[Summary], rows: str = "*") -> list[str]:
    """The rows that something was published of and no run is of; arguments as `family_table`."""
    by_row = _runs_by_row(family, runs, rows)
    return [row for row, of_row in by_row.items() if row in family.published and not of_row]


def _runs_by_row(family: RecipeFamily, runs: Sequence[Summary], rows: str) -> dict[str, list[Summary]]:
    by_row: dict[str, list[Summary]] = {row: [] for row in family.variants}
    for run in runs:
        row = family_row(family, run)
        if row is None:
            raise ValueError(f"{run.name} is a run of none of the rows of {family.path}")
        by_row[row].append(run)
    chosen = {row: of_row for row, of_row in by_row.items() if fnmatchcase(row, rows)}
    if not chosen:
        raise ValueError(f"{family.path} has no row like {rows!r}; there are: {', '.join(family.variants)}")
    return chosen


def family_row(family: RecipeFamily, run: Summary) -> str | None:
    """The row that a run is of: the same experiment, model and segment; how long and with what dropout it was trained
    does not count. None where there is no such row."""
    settings = {row: _identity(recipe) for row, recipe in family.variants.items()}
    # A setting that all rows share, such as a dropout, is how they are trained.
    telling = {
        key for key in set().union(*settings.values()) if len({repr(one.get(key)) for one in settings.values()}) > 1
    }
    fitting = {}
    for row, recipe in settings.items():
        own = {key: value for key, value in recipe.items() if key in telling or key in IDENTITY}
        if all(run.value(key) == value for key, value in own.items()):
            fitting[row] = len(own)
    # Transformer-XL is what the Transformer is where nothing is said of the memory: the more particular row counts.
    return max(fitting, key=fitting.__getitem__, default=None)


def _identity(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in flat(recipe)
        if key in ("experiment", "data.segment_length") or key.startswith("model.")
    }


def require_runs(runs: Sequence[Summary]) -> None:
    """Raise ValueError where there are none."""
    if not runs:
        raise ValueError(
            "there are no summaries of such runs: add some with `recurra report --add RUN`, or let the section ask "
            "whether there are: {% if RUNS %}"
        )


def markdown_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of words that hold no |."""
    head, *others = ["| " + " | ".join(cells) + " |" for cells in [heads, *lines]]
    return "\n".join([head, "|---" * len(heads) + "|", *others])
