"""`recurra demo`: does it help that the data controls the transition? Two small models, trained and
compared."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import recurra
from recurra.cli.arguments import command_parser
from recurra.cli.figures import draw_comparison, draw_gates, score_by_span
from recurra.evaluation import EvaluationResult, SpanAccuracy, evaluate
from recurra.runs import open_run
from recurra.training import RunFolder, Trainer, load_recipe, to_yaml
from recurra.training.allocator import keep_large_blocks

VARIANTS = ("data-controlled", "fixed")


def run(words: Sequence[str]) -> int:
    """Train both variants on a reduced Memory Horizon, print the comparison and draw the figures."""
    parser = command_parser(
        "demo", "Train a data-controlled and a fixed transition on a small Memory Horizon.", overrides=False
    )
    parser.add_argument("--run", default="runs/demo", metavar="FOLDER", help="where to write (default: runs/demo)")
    folder = Path(parser.parse_args(words).run)
    keep_large_blocks()
    console = Console()
    runs = []
    for variant in VARIANTS:
        if not _train(variant, folder / variant, console):
            print(f"stopped; go on with: recurra demo --run {folder}", file=sys.stderr)
            return 130
        runs.append(open_run(str(folder / variant)))
    results = {run.name: score_by_span(run) for run in runs}
    console.print(_accuracy_table(results))
    spans = {name: by_span for name, (_, by_span) in results.items()}
    files = draw_comparison(runs, spans, 1 / runs[0].data.output_size, folder / "figures")
    files += [file for run in runs for file in draw_gates(run)]
    console.print("figures:", *files, sep="\n  ", markup=False, highlight=False, soft_wrap=True)
    return 0


def recipes_folder() -> Path:
    """The recipes that come with the source tree.

    Raises:
        FileNotFoundError: the package runs from somewhere else.
    """
    folder = Path(recurra.__file__).resolve().parents[2] / "recipes"
    if not folder.is_dir():
        raise FileNotFoundError(f"there are no recipes in {folder}: run the demo from a checkout of the repository")
    return folder


def _train(variant: str, path: Path, console: Console) -> bool:
    """Train a variant to its end, from where an earlier demo left it; False where a signal came first."""
    folder = RunFolder(path)
    experiment = load_recipe(recipes_folder() / "demo" / f"{variant}.yaml")
    trainer = Trainer(experiment, folder, evaluate)
    goes_on = folder.config.exists()
    if goes_on:
        trainer.resume("last")
    folder.write_config(to_yaml(experiment))
    console.rule(f"{variant} transition" + (f", going on in {path}" if goes_on else ""), align="left")
    trainer.fit(console)
    return trainer.finished


def _accuracy_table(results: Mapping[str, tuple[EvaluationResult, SpanAccuracy]]) -> Table:
    """Test accuracy of the variants side by side, over all positions and by memory span."""
    table = Table("memory span", *(f"{name} transition" for name in results), title="Test accuracy")
    table.add_row("all", *(f"[bold]{result.accuracy:.3f}[/bold]" for result, _ in results.values()), end_section=True)
    largest = max(len(spans.counts) for _, spans in results.values()) - 1
    first = 0
    while first <= largest:
        # 0, 1, 2-3, 4-7, 8-15 and so on: spans count on a scale of ratios.
        last = min(max(2 * first - 1, first), largest)
        shares = (_share(spans, first, last) for _, spans in results.values())
        table.add_row(str(first) if first == last else f"{first} to {last}", *shares)
        first = last + 1
    return table


def _share(spans: SpanAccuracy, first: int, last: int) -> str:
    counts = int(spans.counts[first : last + 1].sum())
    return f"{int(spans.n_correct[first : last + 1].sum()) / counts:.3f}" if counts else "-"
