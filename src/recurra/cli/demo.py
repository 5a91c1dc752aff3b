"""`recurra demo`: does a data-controlled transition help? Train two small models and compare them."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recurra._choices import recipes_folder
from recurra._process import keep_large_blocks
from recurra.data.memory_horizon import SpanAccuracy
from recurra.train._figures import draw_comparison, draw_gates, gates_of
from recurra.train.evaluate import EvaluationResult, evaluate
from recurra.train.loop import Trainer
from recurra.train.recipe import load_recipe, to_yaml
from recurra.train.run import open_run
from recurra.train.run_folder import RunFolder

_TRANSITIONS = ("data-controlled", "fixed")


def demo(arguments: Namespace) -> int:
    folder = arguments.run_dir
    keep_large_blocks()
    console = Console()
    for transition in _TRANSITIONS:
        if not _train(transition, folder / transition, console):
            print(f"stopped; continue with: recurra demo --run-dir {shlex.quote(str(folder))}", file=sys.stderr)
            return 130
    runs = [open_run(folder / transition) for transition in _TRANSITIONS]
    results = {run.name: run.task.score_by_span(run) for run in runs}
    console.print(_accuracy_table(results))
    spans = {name: by_span for name, (_, by_span) in results.items()}
    files = draw_comparison(runs, spans, folder / "figures")
    files += [file for run in runs for file in draw_gates(run, gates_of(run))]
    console.print("figures:", *files, sep="\n  ", markup=False, highlight=False, soft_wrap=True)
    explored = " ".join(run.folder.quoted for run in runs)
    console.print(
        f"to play with them in the browser: recurra explore {explored}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _train(transition: str, path: Path, console: Console) -> bool:
    """Train a model to the end, from where an earlier demo stopped; False if a signal came first."""
    folder = RunFolder(path)
    experiment = load_recipe(recipes_folder() / "demo" / f"{transition}.yaml")
    trainer = Trainer(experiment, folder, evaluate)
    folder.lock()
    resumes = folder.config.exists()
    if resumes:
        trainer.resume("last")
    folder.write_config(to_yaml(experiment))
    console.rule(f"{transition} transition" + (f", continued in {path}" if resumes else ""), align="left")
    trainer.fit(console)
    return trainer.finished


def _accuracy_table(results: Mapping[str, tuple[EvaluationResult, SpanAccuracy]]) -> Table:
    table = Table("memory span", *(f"{name} transition" for name in results), title="Test accuracy")
    table.add_row("all", *(f"[bold]{result.accuracy:.3f}[/bold]" for result, _ in results.values()), end_section=True)
    largest = max(len(spans.counts) for _, spans in results.values()) - 1
    first = 0
    while first <= largest:
        # 0, 1, 2-3, 4-7, 8-15 and so on: spans matter by their ratios.
        last = min(max(2 * first - 1, first), largest)
        inside = [(spans.n_correct[first : last + 1], spans.counts[first : last + 1]) for _, spans in results.values()]
        shares = [f"{int(right.sum()) / int(all_.sum()):.3f}" if all_.any() else "-" for right, all_ in inside]
        table.add_row(str(first) if first == last else f"{first} to {last}", *shares)
        first = last + 1
    return table
