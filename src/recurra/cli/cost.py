"""`recurra cost`: what a segment costs in FLOPs, parameters and carried bytes, by the paper's formulas and counted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recurra.analysis import MeasuredCost, PublishedCost, measured_cost, model_kind, published_cost
from recurra.analysis.plots import CostPoint, perplexity_over_flops, save
from recurra.cli.arguments import command_parser, split_overrides
from recurra.data import MemoryHorizonConfig, TextConfig
from recurra.data.files import replacing
from recurra.models import DataSizes, VideoSizes
from recurra.runs import open_run
from recurra.runs.score_files import score_file
from recurra.training import Experiment, load_recipe

DESCRIPTION = "Count what the models of recipes or runs do for one segment, beside the CRT paper's formulas (Table 1)."
CAPTION = (
    "One forward of a segment of n tokens, batch 1, the memory full. counted: FLOPs of the blocks, 2 for a "
    "multiply-add of a matrix product or scan, elementwise work left out; vocabulary: those of embedding and softmax. "
    "formula: Table 1 of the CRT paper, which leaves embedding and softmax out and counts FLOPs in some terms and "
    "multiply-adds in others; CRT-NCGRU is given CRT-GRU's. state: what is carried to the next segment."
)
WIDTH = 200
"""Columns of the table where the output is no terminal."""


class Row(NamedTuple):
    """A recipe or a run, as it was named, and what its model costs."""

    name: str
    kind: str
    n_layer: int
    segment_length: int
    published: PublishedCost | None
    measured: MeasuredCost


def run(words: Sequence[str]) -> int:
    """Print a table; write the numbers and draw the figure where asked to."""
    own, overrides = split_overrides(words)
    parser = command_parser("cost", DESCRIPTION)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="recipes, FILE or FILE#VARIANT, or runs' folders")
    parser.add_argument(
        "--vocabulary", type=int, metavar="N", help="size of the vocabulary, instead of looking at the corpus"
    )
    parser.add_argument("--json", metavar="FILE", help="write the numbers to this file")
    parser.add_argument(
        "--plot", metavar="FOLDER", help="draw test perplexity over FLOPs into this folder; for runs that were scored"
    )
    arguments = parser.parse_args(own)
    if arguments.vocabulary is not None and arguments.vocabulary < 1:
        raise ValueError(f"--vocabulary must be 1 or more, got {arguments.vocabulary}")
    # Before the counting, which takes longer than to find that a score is missing.
    perplexities = [scored_perplexity(word, overrides) for word in arguments.recipes] if arguments.plot else []
    rows = [cost_row(word, overrides, arguments.vocabulary) for word in arguments.recipes]
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=WIDTH)
    console.print(cost_table(rows))
    if arguments.json:
        with replacing(Path(arguments.json)) as file:
            file.write((json.dumps([as_plain(row) for row in rows], indent=2) + "\n").encode())
    if arguments.plot:
        figure = perplexity_over_flops(cost_curves(rows, perplexities))
        for path in save(figure, arguments.plot, "perplexity-over-flops"):
            print(path)
    return 0


def cost_row(word: str, overrides: Sequence[str], vocabulary: int | None) -> Row:
    """Count one recipe or run.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: the recipe is impossible, or its corpus is not there and `vocabulary` is None.
    """
    experiment = open_run(word, overrides=overrides).experiment if Path(word).is_dir() else load_recipe(word, overrides)
    sizes = _stated_sizes(word, experiment, vocabulary) if vocabulary is not None else _sizes(word, experiment)
    with torch.device("meta"):
        model: Any = experiment.model.build(sizes)
    return model_cost(word, experiment, model)


def model_cost(name: str, experiment: Experiment, model: Any) -> Row:
    """Count the model of an experiment.

    Raises:
        ValueError: it is of another kind than those that can be counted.
    """
    n_steps = _segment_length(experiment)
    measured = measured_cost(model, n_steps)
    return Row(name, model_kind(model), model.config.n_layer, n_steps, published_cost(model), measured)


def scored_perplexity(word: str, overrides: Sequence[str] = ()) -> float:
    """The perplexity that `recurra eval` found on the test split of a run, with the same overrides.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: this is no folder, or the run was not scored; the message says how to.
    """
    if not Path(word).is_dir():
        raise ValueError(f"--plot draws what runs scored, and {word} is no run's folder; train it first")
    run = open_run(word, overrides=overrides)
    scores = run.folder.path / score_file("test", run.changes)
    try:
        return float(json.loads(scores.read_text(encoding="utf-8"))["perplexity"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        command = " ".join(["recurra eval", word, *overrides])
        raise ValueError(f"there is no test perplexity in {scores}; score the run first:\n  {command}") from error


def cost_curves(rows: Sequence[Row], perplexities: Sequence[float]) -> dict[str, list[CostPoint]]:
    """The points of the figure, by kind of model, and by its depth where depths differ."""
    depths = {row.n_layer for row in rows}
    curves: dict[str, list[CostPoint]] = {}
    for row, perplexity in zip(rows, perplexities):
        name = row.kind if len(depths) == 1 else f"{row.kind}, {row.n_layer} layers"
        curves.setdefault(name, []).append(CostPoint(row.segment_length, row.measured.block_flops, perplexity))
    return curves


def cost_table(rows: Sequence[Row]) -> Table:
    """One row for each recipe."""
    table = Table(title="The cost of a segment", caption=CAPTION, box=box.SIMPLE_HEAD, caption_justify="left")
    table.add_column("recipe", overflow="fold")
    table.add_column("model")
    for heading in (
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
    ):
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


def as_plain(row: Row) -> dict[str, Any]:
    """A row as JSON has it: exact numbers; `published` is null where the paper has no formula."""
    published = row.published._asdict() if row.published else None
    return {**row._asdict(), "published": published, "measured": row.measured._asdict()}


def _sizes(word: str, experiment: Experiment) -> DataSizes | VideoSizes:
    try:
        return experiment.sizes(experiment.build_data())
    except (OSError, ValueError) as error:
        if not isinstance(experiment.data, TextConfig):
            raise
        raise ValueError(
            f"{word}: {error}\nwithout the corpus, state the size of its vocabulary: --vocabulary 10000, say"
        ) from error


def _stated_sizes(word: str, experiment: Experiment, vocabulary: int) -> DataSizes:
    if not isinstance(experiment.data, TextConfig):
        raise ValueError(
            f"--vocabulary is for recipes that read a corpus; {word} is a {experiment.experiment} experiment"
        )
    return DataSizes(vocabulary, vocabulary, experiment.data.segment_length)


def _segment_length(experiment: Experiment) -> int:
    """What a model reads between two updates of its state: a segment of text, a whole sequence of Memory Horizon."""
    data = experiment.data
    if isinstance(data, TextConfig):
        return data.segment_length
    if isinstance(data, MemoryHorizonConfig):
        return data.sequence_length
    raise ValueError(
        f"only models of texts and of Memory Horizon can be counted; this is a {experiment.experiment} one"
    )


def _in(unit: float, number: int) -> str:
    return f"{number / unit:,.3f}"
