"""`recurra gradients`: measure how gradients pass between the segments of trained Compact Recurrent Transformers."""

import math
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from recurra.analysis.gradient_flow import GradientFlow
from recurra.analysis.plots.figure import save
from recurra.analysis.plots.gradient_flow import gradient_over_distance
from recurra.cli.arguments import add_checkpoint, command_parser, split_overrides
from recurra.data.batches import SPLITS
from recurra.train.figures import measure_gradients, measured_tokens, require_different_names, write_gradients
from recurra.train.process import keep_large_blocks
from recurra.train.run import open_run

_DESCRIPTION = """\
Measure ||dy_k/dy_i|| between the segments of trained Compact Recurrent Transformers, and its bound, CRT (2). Prints
tables, writes RUN/gradients.json for each run, and draws one figure of all runs."""


def run(words: Sequence[str]) -> int:
    """Measure, print, write and draw."""
    own, overrides = split_overrides(words)
    arguments = _parser().parse_args(own)
    split, segments, warm_up = arguments.split, arguments.segments, arguments.warm_up
    keep_large_blocks()
    runs = [open_run(path, checkpoint=arguments.checkpoint, overrides=overrides) for path in arguments.runs]
    require_different_names(runs)
    tokens = [measured_tokens(run, split, segments=segments, warm_up=warm_up) for run in runs]
    flows = {}
    progress_console = Console(stderr=True)
    with Progress(console=progress_console, transient=True, disable=not progress_console.is_terminal) as progress:
        for trained, text in zip(runs, tokens):
            track = partial(_track, progress, trained.name)
            flows[trained.name] = measure_gradients(trained, text, warm_up=warm_up, track=track)
    options = {"split": split, "checkpoint": arguments.checkpoint, "segments": segments, "warm_up": warm_up}
    for trained in runs:
        write_gradients(trained, {**options, "step": trained.step}, flows[trained.name])
    files = save(gradient_over_distance(flows), arguments.out or runs[0].folder.figures, "gradient-flow")
    console = Console(markup=False)
    for name, flow in flows.items():
        console.print(_distance_table(name, flow))
    console.print(_step_table(flows))
    for file in files:
        console.print(str(file), soft_wrap=True, markup=False, highlight=False)
    return 0


def _parser() -> ArgumentParser:
    parser = command_parser("gradients", _DESCRIPTION)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of the runs")
    parser.add_argument("--split", choices=SPLITS, default="test", help="split to read the text from (default: test)")
    parser.add_argument(
        "--segments", type=int, default=3, metavar="N", help="segments to measure, at least 2 (default: 3)"
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        default=4,
        metavar="N",
        help="segments to read first, from the start of the split, so that the memory is no longer zeros (default: 4)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for the figure (default: the first RUN/figures)"
    )
    add_checkpoint(parser)
    return parser


def _track(progress: Progress, run: str, pieces: Sequence[Tensor], name: str) -> Iterable[Tensor]:
    task = progress.add_task(f"{run}: {name}", total=len(pieces))
    yield from progress.track(pieces, task_id=task)
    progress.remove_task(task)


def _distance_table(name: str, flow: GradientFlow) -> Table:
    """Tabulate ||dy_k/dy_i|| and its bounds for the first and last source of every segment, the nearest first."""
    table = Table(title=f"{name}: ||dy_k/dy_i||, and bounds of the path along the RNN")
    columns = {
        "all paths": flow.total.log10(),
        "along RNN": flow.direct.log10(),
        "measured steps": flow.log10_bound_measured,
        "CRT (2)": flow.log10_bound,
        "a priori": flow.log10_bound_a_priori,
    }
    for heading in ("k", "i", "k - i", *columns):
        table.add_column(heading, justify="right")
    n = flow.segment_length
    for row, target in enumerate(flow.targets.tolist()):
        for source in flow.sources.flip(0).tolist():
            if source % n in (0, n - 1):
                numbers = [_scientific(float(values[row, source])) for values in columns.values()]
                table.add_row(str(target), str(source), str(target - source), *numbers)
        table.add_section()
    return table


def _step_table(flows: Mapping[str, GradientFlow]) -> Table:
    """Tabulate what a step of the memory RNN does to a gradient, with a column for each run."""
    table = Table(title="a step of the memory RNN: ||dh_t/dh_t-1||")
    table.add_column(overflow="fold")
    for name in flows:
        table.add_column(name, justify="right", overflow="fold")
    rows: Mapping[str, Callable[[GradientFlow], float | Tensor]] = {
        "median": lambda flow: flow.steps.norms.median(),
        "largest": lambda flow: flow.steps.norms.max(),
        "alpha + beta ||U_c||, median": lambda flow: flow.steps.bounds.median(),
        "alpha + beta ||U_c||, largest": lambda flow: flow.steps.bounds.max(),
        "its bound by the weights": lambda flow: flow.steps.bound_a_priori,
        "||U_c||": lambda flow: flow.steps.candidate_norm,
    }
    for heading, number in rows.items():
        table.add_row(heading, *(f"{float(number(flow)):.4f}" for flow in flows.values()))
    errors = [flow.orthogonality_error for flow in flows.values()]
    table.add_row("||U_c^T U_c - I||", *("not orthogonal" if error is None else f"{error:.1e}" for error in errors))
    return table


def _scientific(logarithm: float) -> str:
    """10 to the power of a number, even where that does not fit into a float: 69.45 gives 2.8e+69."""
    if logarithm == -math.inf:
        return "0"
    mantissa, exponent = f"{10 ** (logarithm % 1):.1e}".split("e")
    return f"{mantissa}e{int(logarithm // 1) + int(exponent):+03d}"
