"""`recurra sweep`: train a recipe with every combination of some values, and compare the runs."""

import itertools
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recurra._process import keep_large_blocks
from recurra.checks import require, sentence
from recurra.cli._tables import print_table
from recurra.train.experiment import RESUMABLE, differences, require_resumable, to_plain
from recurra.train.loop import Trainer
from recurra.train.recipe import as_settings, as_words, load_recipe
from recurra.train.run import default_run_folder, resume_run, start_run
from recurra.train.run_folder import RunFolder


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep: its values by key, and the scores of its best evaluation, which are empty if it diverged."""

    folder: Path
    values: Mapping[str, str]
    scores: Mapping[str, int | float]


def sweep(arguments: Namespace) -> int:
    keep_large_blocks()
    usual = default_run_folder(arguments.recipe)
    out = arguments.out or usual.with_name(f"{usual.name}-sweep")
    space, fixed = _space(arguments.overrides)
    combinations = [dict(zip(space, values)) for values in itertools.product(*space.values())]
    console = Console(stderr=True) if arguments.style else None
    runs = [train_with(arguments.recipe, out, values, fixed, console) for values in combinations]
    monitor = load_recipe(arguments.recipe, overrides=as_words(combinations[0], fixed)).training.monitor
    sign = 1 if monitor == "loss" else -1
    runs.sort(key=lambda one: sign * one.scores[monitor] if one.scores else float("inf"))
    rows = [{**one.values, **one.scores, "run": str(one.folder)} for one in runs]
    print_table(arguments.style, rows, _sweep_table(out.name, [*space], runs))
    return 0


def _space(overrides: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    given = as_settings(overrides)
    space = {key: text.split(",") for key, text in given.items() if "," in text and text[0] not in "[{"}
    if not space:
        expected = "several for at least one key, as in --optimizer.learning_rate 0.001,0.003"
        raise ValueError(sentence("the values to sweep over", "none", expected))
    return space, {key: text for key, text in given.items() if key not in space}


def train_with(
    recipe: str, out: Path, values: Mapping[str, str], fixed: Mapping[str, str], console: Console | None = None
) -> SweptRun:
    """Train a recipe with some values, or resume or read the run that has them; `console` shows the progress."""
    name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items()).replace("/", "-")
    folder, words = RunFolder(out / name), as_words(fixed, values)
    try:
        trainer = _resumed(recipe, folder, words) if folder.config.exists() else start_run(recipe, folder.path, words)
        if _is_over(trainer):
            trainer.folder.unlock()
            if console:
                console.print("already finished")
        elif trainer.fit(console).received is not None:
            raise KeyboardInterrupt("run the same command again to continue")
    except FloatingPointError:  # the loss is not finite, which is a result like others
        return SweptRun(folder.path, values, {})
    return SweptRun(folder.path, values, trainer.scores.get("best", {}))


def _is_over(trainer: Trainer) -> bool:
    """Say whether nothing is left to do: a process that is killed at its end may have written no summary of it."""
    return trainer.finished and trainer.folder.summary.is_file() and bool(trainer.folder.read_summary()["finished"])


def _resumed(recipe: str, folder: RunFolder, words: Sequence[str]) -> Trainer:
    """Resume a run of the sweep with what the recipe says of its length now; refuse a run of other settings or data."""
    own, asked = load_recipe(folder.config), load_recipe(recipe, words)
    if asked.training.precision == "auto":
        asked = replace(asked, training=replace(asked.training, precision=own.training.precision))
    before, now = to_plain(own), to_plain(asked)
    try:
        require_resumable(before, asked)
        for key in ("path", "poses"):
            there, wanted = before["data"].get(key), now["data"].get(key)
            require(there == wanted, f"data.{key}", wanted, f"{there!r}, which this run was trained on")
    except ValueError as error:
        raise ValueError(f"{folder.path}: {error}; or choose a different folder for the runs") from error
    changes = {key: json.dumps(new) for key, (_, new) in differences(before, now).items() if key in RESUMABLE}
    return resume_run(folder.path, overrides=as_words(changes))


def _sweep_table(title: str, keys: Sequence[str], runs: Sequence[SweptRun]) -> Table:
    table = Table(title=title)
    short = [key.rpartition(".")[2] for key in keys]
    names = [key if short.count(name) > 1 else name for key, name in zip(keys, short)]
    for name in (*names, "step", "loss", "accuracy", "run"):
        table.add_column(name, overflow="fold")
    for one in runs:
        scores = [f"{one.scores[name]:.4f}" if name in one.scores else "" for name in ("loss", "accuracy")]
        table.add_row(
            *(one.values[key] for key in keys), str(one.scores.get("step", "diverged")), *scores, str(one.folder)
        )
    return table
