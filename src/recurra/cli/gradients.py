"""`recurra gradients`: how gradients pass between the segments of trained Compact Recurrent Transformers."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from recurra.analysis import GradientFlow, measure_gradient_flow
from recurra.analysis.memory_trace import memory_rnn
from recurra.analysis.plots import gradient_over_distance, save
from recurra.cli.arguments import command_parser, split_overrides
from recurra.data import SPLITS, Split, TextData
from recurra.data.files import replacing
from recurra.models import CompactRecurrentTransformer, CompactRecurrentTransformerState
from recurra.runs import Run, open_run
from recurra.training.allocator import keep_large_blocks


def run(words: Sequence[str]) -> int:
    """Measure, print tables, write RUN/gradients.json for each run and draw one figure of all."""
    own, overrides = split_overrides(words)
    arguments = _parser().parse_args(own)
    keep_large_blocks()
    runs = [open_run(path, checkpoint=arguments.checkpoint, overrides=overrides) for path in arguments.runs]
    if len({run.name for run in runs}) < len(runs):
        raise ValueError(f"the runs' folders must have different names, got {', '.join(run.name for run in runs)}")
    stretches = [_stretch(run, arguments.split, arguments.warm_up, arguments.segments) for run in runs]
    flows = {}
    progress_console = Console(stderr=True)
    with Progress(console=progress_console, transient=True, disable=not progress_console.is_terminal) as progress:
        for trained, tokens in zip(runs, stretches):
            track = partial(_track, progress, trained.name)
            flows[trained.name] = _measure(trained, tokens, arguments.warm_up, track)
    for trained in runs:
        options = {name: getattr(arguments, name) for name in ("split", "checkpoint", "segments", "warm_up")}
        _write(trained, {**options, "step": trained.step}, flows[trained.name])
    folder = Path(arguments.out) if arguments.out else runs[0].folder.figures
    files = save(gradient_over_distance(flows), folder, "gradient-flow")
    console = Console()
    for name, flow in flows.items():
        console.print(distance_table(name, flow))
    console.print(step_table(flows))
    for file in files:
        console.print(str(file), soft_wrap=True, markup=False, highlight=False)
    return 0


def _parser() -> Any:
    parser = command_parser(
        "gradients",
        "Measure ||dy_k/dy_i|| between segments of trained Compact Recurrent Transformers, and its bound, CRT (2).",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the runs' folders")
    parser.add_argument("--split", choices=SPLITS, default="test", help="where the text is from (default: test)")
    parser.add_argument(
        "--segments", type=int, default=3, metavar="N", help="segments to measure, 2 or more (default: 3)"
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        default=4,
        metavar="N",
        help="segments read before, from the start of the split, for a memory that is no longer zeros (default: 4)",
    )
    parser.add_argument("--out", metavar="FOLDER", help="for the figure (default: the first RUN's figures)")
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best (default), last, previous or a file"
    )
    return parser


def _stretch(run: Run, split: Split, warm_up: int, segments: int) -> Tensor:
    """The tokens to read, (1, L): those of the warm-up and those to measure.

    Raises:
        ValueError: the run's model has no memory vector, the numbers are too small, or the split is too short.
    """
    try:
        memory_rnn(run.model)
    except ValueError as error:
        raise ValueError(f"run {run.name}: {error}") from error
    assert isinstance(run.data, TextData)
    assert isinstance(run.model, CompactRecurrentTransformer)
    if segments < 2 or warm_up < 0:
        raise ValueError(f"--segments is {segments} and --warm-up {warm_up}; expected at least 2 and at least 0")
    n_tokens = (warm_up + segments) * run.model.config.segment_length
    tokens = run.data.tokens(split)
    if len(tokens) < n_tokens:
        raise ValueError(
            f"run {run.name}: {warm_up} + {segments} segments are {n_tokens} tokens and the split {split} has "
            f"{len(tokens)}; take fewer with --segments and --warm-up"
        )
    return torch.from_numpy(tokens[:n_tokens].astype("int64"))[None]


def _measure(run: Run, tokens: Tensor, warm_up: int, track: Callable[..., Iterable[Tensor]]) -> GradientFlow:
    model = run.model
    assert isinstance(model, CompactRecurrentTransformer)
    border = warm_up * model.config.segment_length
    with torch.no_grad():
        state = cast(CompactRecurrentTransformerState, model.hidden(tokens[:, :border])[1]) if warm_up else None
    return measure_gradient_flow(model, tokens[:, border:], state, track=track)


def _track(progress: Progress, run: str, pieces: Sequence[Tensor], name: str) -> Iterable[Tensor]:
    task = progress.add_task(f"{run}: {name}", total=len(pieces))
    yield from progress.track(pieces, task_id=task)
    progress.remove_task(task)


def _write(run: Run, options: Mapping[str, Any], flow: GradientFlow) -> None:
    """Write RUN/gradients.json: the options, every number measured, and whose it is, by position."""
    with replacing(run.folder.path / "gradients.json") as file:
        file.write((json.dumps({**options, **_plain(asdict(flow))}, indent=2) + "\n").encode())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, Tensor) else value


def distance_table(name: str, flow: GradientFlow) -> Table:
    """||dy_k/dy_i|| and its bounds for the first and the last source of every segment, by target, the nearest first."""
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


def step_table(flows: Mapping[str, GradientFlow]) -> Table:
    """What a step of the memory RNN does to a gradient, one column a run."""
    table = Table(title="a step of the memory RNN: ||dh_t/dh_t-1||")
    table.add_column()
    for name in flows:
        table.add_column(name, justify="right")
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
    """10 to the power of a number, which need not fit into a float: 69.45 is 2.8e+69."""
    if logarithm == -math.inf:
        return "0"
    mantissa, exponent = f"{10 ** (logarithm % 1):.1e}".split("e")
    return f"{mantissa}e{int(logarithm // 1) + int(exponent):+03d}"
