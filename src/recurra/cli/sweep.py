"""`recurra sweep`: train a recipe with many values, and compare the runs."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recurra.checks import require_at_least, sentence
from recurra.cli.arguments import command_parser, split_overrides
from recurra.runs.start import default_run_folder
from recurra.runs.sweep import Tried, grid, parse_space, search, try_values
from recurra.training import load_recipe
from recurra.training.allocator import keep_large_blocks

DESCRIPTION = """\
Train a recipe with every combination of some values, each run in a folder of its own, and print a table.

--try optimizer.learning_rate=0.001,0.003,0.01 --try training.seed=0,1 makes six runs. With --trials N, Optuna chooses
the values, also from ranges: --try optimizer.learning_rate=log:1e-4..1e-2. A sweep that was stopped continues: run the
same command again; finished runs are read, not repeated."""


def run(words: Sequence[str]) -> int:
    """Sweep, and print the table."""
    own, overrides = split_overrides(words)
    parser = command_parser("sweep", DESCRIPTION)
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or FILE#VARIANT")
    parser.add_argument(
        "--try", dest="tries", action="append", required=True, metavar="KEY=VALUES", help="what to vary"
    )
    parser.add_argument("--trials", type=int, metavar="N", help="let Optuna choose the values of N runs")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the runs (default: runs/RECIPE-sweep)")
    arguments = parser.parse_args(own)
    if arguments.trials is not None:
        require_at_least(1, **{"--trials": arguments.trials})
    keep_large_blocks()
    out = arguments.out or default_run_folder(arguments.recipe).with_name(
        f"{default_run_folder(arguments.recipe).name}-sweep"
    )
    tries = [word.partition("=")[::2] for word in arguments.tries]
    keys = [key for key, _ in tries]
    if twice := [key for number, key in enumerate(keys) if key in keys[:number]]:
        mend = "give it all its values, with commas between"
        raise ValueError(sentence("--try", f"{twice[0]} twice", "each key once", mend))
    space = parse_space(dict(tries))
    measure = load_recipe(arguments.recipe, overrides).training.monitor

    def attempt(values: dict[str, str]) -> Tried:
        return try_values(arguments.recipe, out, values, overrides)

    if arguments.trials is None:
        tried = [attempt(values) for values in grid(space)]
    else:
        tried = search(space, out, attempt, arguments.trials, measure)
    Console(markup=False).print(sweep_table(out.name, keys, tried, measure))
    return 0


def sweep_table(title: str, keys: Sequence[str], tried: Sequence[Tried], measure: str) -> Table:
    """Tabulate the runs of a sweep with the values of some keys, the best first."""
    table = Table(title=title)
    short = [key.rpartition(".")[2] for key in keys]
    for key, name in zip(keys, short):
        table.add_column(key if short.count(name) > 1 else name, overflow="fold")
    for name in ("step", "loss", "accuracy", "run"):
        table.add_column(name, overflow="fold")
    worst = float("inf")
    sign = 1 if measure == "loss" else -1
    for one in sorted(tried, key=lambda one: sign * one.scores[measure] if one.scores else worst):
        scores = [f"{one.scores[name]:.4f}" if name in one.scores else "" for name in ("loss", "accuracy")]
        step = str(one.scores.get("step", "diverged"))
        table.add_row(*(one.values.get(key, "") for key in keys), step, *scores, str(one.folder))
    return table
