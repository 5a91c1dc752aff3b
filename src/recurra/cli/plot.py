"""`recurra plot`: draw the figures of one or more runs."""

from collections.abc import Sequence
from pathlib import Path

from recurra.cli.arguments import add_checkpoint, command_parser, split_overrides
from recurra.train.figures import draw_runs
from recurra.train.run import open_run

_DESCRIPTION = """\
Draw the figures of one or more runs as PNG and SVG. Each run's gates or, over videos, its confusion matrix go into its
own folder; the curves, and the accuracy by memory span, compare all the runs."""


def run(words: Sequence[str]) -> int:
    """Draw, and print the files' paths."""
    own, overrides = split_overrides(words)
    parser = command_parser("plot", _DESCRIPTION)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of the runs")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for the figures of all runs (default: the first RUN/figures)"
    )
    add_checkpoint(parser)
    arguments = parser.parse_args(own)
    runs = [open_run(path, checkpoint=arguments.checkpoint, overrides=overrides) for path in arguments.runs]
    for file in draw_runs(runs, arguments.out):
        print(file)
    return 0
