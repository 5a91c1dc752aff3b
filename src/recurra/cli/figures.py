"""`recurra plot`, `cost` and `gradients`: figures of runs, and tables of what their models cost and how they learn."""

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from recurra._process import keep_large_blocks
from recurra.analysis.gradient_flow import GradientFlow
from recurra.analysis.plots.figure import save
from recurra.analysis.plots.gradient_flow import gradient_over_distance
from recurra.analysis.plots.scores import perplexity_over_flops
from recurra.checks import require_at_least
from recurra.cli._tables import print_table
from recurra.train._figures import (
    CostRow,
    cost_curves,
    cost_of,
    draw_runs,
    measure_gradients,
    measured_tokens,
    require_different_names,
    scored_perplexity,
    shared_folder,
    write_gradients,
)
from recurra.train.run import open_run


def plot(arguments: Namespace) -> int:
    runs = [open_run(path, checkpoint=arguments.checkpoint, overrides=arguments.overrides) for path in arguments.runs]
    for file in draw_runs(runs, arguments.out):
        print(file)
    return 0


_CAPTION = (
    "One forward pass over a segment of n tokens, batch 1, memory full. counted: FLOPs of the blocks, 2 for a "
    "multiply-add, without elementwise work; vocabulary: those of embedding and softmax. formula: Table 1 of the CRT "
    "paper, which omits embedding and softmax and counts FLOPs in some terms and multiply-adds in others; CRT-NCGRU "
    "gets CRT-GRU's. state: what is carried to the next segment."
)


def cost(arguments: Namespace) -> int:
    if arguments.vocabulary is not None:
        require_at_least(1, **{"--vocabulary": arguments.vocabulary})
    # Before the counting, which takes longer than finding that a score is missing.
    perplexities = (
        [scored_perplexity(word, arguments.overrides) for word in arguments.recipes] if arguments.plot else []
    )
    rows = [cost_of(word, arguments.overrides, vocabulary=arguments.vocabulary) for word in arguments.recipes]
    print_table(arguments.style, [row.as_plain() for row in rows], _cost_table(rows), wide=True)
    if arguments.plot:
        figure = perplexity_over_flops(cost_curves(rows, perplexities))
        for path in save(figure, arguments.plot, "perplexity-over-flops"):
            print(path, file=sys.stderr if arguments.style else sys.stdout)
    return 0


def _cost_table(rows: Sequence[CostRow]) -> Table:
    table = Table(title="The cost of a segment", caption=_CAPTION, box=box.SIMPLE_HEAD, caption_justify="left")
    table.add_column("recipe", overflow="fold")
    table.add_column("model")
    flops, parameters = ("formula", "counted", "vocabulary"), ("formula", "blocks", "total")
    numbers = [*(f"GFLOPs\n{which}" for which in flops), *(f"M params\n{which}" for which in parameters)]
    for heading in ("layers", "n", *numbers[:2], "counted/\nformula", *numbers[2:], "state\nbytes"):
        table.add_column(heading, justify="right")
    for row in rows:
        published, measured = row.published, row.measured
        table.add_row(
            row.name,
            row.kind,
            str(row.n_layer),
            str(row.segment_length),
            _in(1e9, published.flops) if published else "-",
            _in(1e9, measured.block_flops),
            f"{measured.block_flops / published.flops:.3f}" if published else "-",
            _in(1e9, measured.vocabulary_flops),
            _in(1e6, published.parameters) if published else "-",
            _in(1e6, measured.block_parameters),
            _in(1e6, measured.parameters),
            f"{measured.state_bytes:,}",
        )
    return table


def _in(unit: float, number: int) -> str:
    return f"{number / unit:,.3f}"


def gradients(arguments: Namespace) -> int:
    split, segments, warm_up = arguments.split, arguments.segments, arguments.warm_up
    keep_large_blocks()
    runs = [open_run(path, checkpoint=arguments.checkpoint, overrides=arguments.overrides) for path in arguments.runs]
    require_different_names(runs)
    tokens = [measured_tokens(run, split, segments=segments, warm_up=warm_up) for run in runs]
    measured = track(list(zip(runs, tokens)), "measuring", console=Console(stderr=True), transient=True)
    flows = {trained.name: measure_gradients(trained, text, warm_up=warm_up) for trained, text in measured}
    options = {"split": split, "checkpoint": arguments.checkpoint, "segments": segments, "warm_up": warm_up}
    for trained in runs:
        write_gradients(trained, {**options, "step": trained.step}, flows[trained.name])
    files = save(gradient_over_distance(flows), arguments.out or shared_folder(runs), "gradient-flow")
    console = Console(markup=False)
    for name, flow in flows.items():
        console.print(_distance_table(name, flow))
    console.print(_step_table(flows))
    for file in files:
        console.print(str(file), soft_wrap=True, markup=False, highlight=False)
    return 0


def _distance_table(name: str, flow: GradientFlow) -> Table:
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
