"""`recurra eval`: the scores of a run on a split."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from recurra.cli.arguments import command_parser, split_overrides
from recurra.cli.runs import open_run
from recurra.data import SPLITS
from recurra.data.files import replacing
from recurra.evaluation import evaluate
from recurra.training.allocator import keep_large_blocks


def run(words: Sequence[str]) -> int:
    """Evaluate, print a table and write RUN/eval-<split>.json."""
    own, overrides = split_overrides(words)
    parser = command_parser("eval", "Score a trained run on a split, in float32.")
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("--split", choices=SPLITS, default="test", help="default: test")
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best (default), last, previous or a file"
    )
    arguments = parser.parse_args(own)
    keep_large_blocks()
    trained = open_run(arguments.run, checkpoint=arguments.checkpoint, overrides=overrides)
    result = evaluate(trained.model, trained.data.source(arguments.split))
    scores = {
        "split": arguments.split,
        "checkpoint": arguments.checkpoint,
        "step": trained.step,
        **result._asdict(),
    }
    target = trained.folder.path / f"eval-{arguments.split}.json"
    with replacing(target) as file:
        file.write((json.dumps(scores, indent=2) + "\n").encode())
    table = Table(title=trained.name, show_header=False)
    for name, value in scores.items():
        table.add_row(name.replace("_", " "), f"{value:,.4f}" if isinstance(value, float) else str(value))
    Console().print(table)
    return 0
