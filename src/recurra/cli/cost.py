"""`recurra cost`: count what a segment costs in FLOPs, parameters and carried bytes."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recurra.analysis.plots.figure import save
from recurra.analysis.plots.scores import perplexity_over_flops
from recurra.checks import require_at_least
from recurra.cli.arguments import command_parser, split_overrides
from recurra.files.writing import replacing
from recurra.train.figures import CostRow, cost_curves, cost_of, scored_perplexity

_DESCRIPTION = """\
Count what the models of recipes or runs do for one segment, beside the formulas of the CRT paper's Table 1. No weight
is allocated."""
_CAPTION = (
    "One forward pass over a segment of n tokens, batch 1, memory full. counted: FLOPs of the blocks, 2 for a "
    "multiply-add of a matrix product or scan, without elementwise work; vocabulary: those of embedding and softmax. "
    "formula: Table 1 of the CRT paper, which omits embedding and softmax and counts FLOPs in some terms and "
    "multiply-adds in others; CRT-NCGRU gets CRT-GRU's. state: what is carried to the next segment."
)
_WIDTH = 200
"""Columns of the table if the output is not a terminal."""
_HEADINGS = (
    "layers",
    "n",
    "GFLOPs\nformula",
    "GFLOPs\ncounted",
    "counted/\nformula",
    "GFLOPs\nvocabulary",
    "M params\nformula",
    "M params\nblocks",
    "M params\ntotal",
    "state\nbytes",
)


def run(words: Sequence[str]) -> int:
    """Print a table; write the numbers and draw the figure if asked to."""
    own, overrides = split_overrides(words)
    parser = command_parser("cost", _DESCRIPTION)
    parser.add_argument(
        "recipes", nargs="+", metavar="RECIPE", help="recipes, files or names, with #VARIANT, or folders of runs"
    )
    parser.add_argument(
        "--vocabulary", type=int, metavar="N", help="size of the vocabulary, so that the corpus is not needed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    parser.add_argument(
        "--plot", type=Path, metavar="FOLDER", help="draw test perplexity over FLOPs into FOLDER; needs scored runs"
    )
    arguments = parser.parse_args(own)
    if arguments.vocabulary is not None:
        require_at_least(1, **{"--vocabulary": arguments.vocabulary})
    # Before the counting, which takes longer than finding that a score is missing.
    perplexities = [scored_perplexity(word, overrides) for word in arguments.recipes] if arguments.plot else []
    rows = [cost_of(word, overrides, vocabulary=arguments.vocabulary) for word in arguments.recipes]
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_WIDTH)
    console.print(_cost_table(rows))
    if arguments.json:
        with replacing(arguments.json) as file:
            file.write((json.dumps([row.as_plain() for row in rows], indent=2) + "\n").encode())
    if arguments.plot:
        figure = perplexity_over_flops(cost_curves(rows, perplexities))
        for path in save(figure, arguments.plot, "perplexity-over-flops"):
            print(path)
    return 0


def _cost_table(rows: Sequence[CostRow]) -> Table:
    """Tabulate the costs, a line for each recipe."""
    table = Table(title="The cost of a segment", caption=_CAPTION, box=box.SIMPLE_HEAD, caption_justify="left")
    table.add_column("recipe", overflow="fold")
    table.add_column("model")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        published, measured = row.published, row.measured
        table.add_row(
            escape(row.name),
            escape(row.kind),
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
