"""`recurra plot`: the figures of one or more runs, as PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path

from recurra.cli.arguments import command_parser, split_overrides
from recurra.cli.figures import draw_comparison, draw_gates, score_by_span
from recurra.cli.video_scores import draw_written_confusion
from recurra.data import MemoryHorizon
from recurra.runs import open_run
from recurra.runs.score_files import score_file
from recurra.training import VideoExperiment


def run(words: Sequence[str]) -> int:
    """Draw each run's gates or confusion matrix into its own folder and everything that compares runs into one."""
    own, overrides = split_overrides(words)
    parser = command_parser(
        "plot",
        "Draw a run's gates or, over videos, its confusion matrix, and the curves and the accuracy by memory span of "
        "all given runs.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the runs' folders")
    parser.add_argument("--out", metavar="FOLDER", help="for figures of all runs (default: the first RUN's figures)")
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best (default), last, previous or a file"
    )
    arguments = parser.parse_args(own)
    runs = [open_run(path, checkpoint=arguments.checkpoint, overrides=overrides) for path in arguments.runs]
    if len({run.name for run in runs}) < len(runs):
        raise ValueError(f"the runs' folders must have different names, got {', '.join(run.name for run in runs)}")
    files = [file for run in runs for file in draw_gates(run)]
    for run in runs:
        if isinstance(run.experiment, VideoExperiment):
            files += draw_written_confusion(run.folder.path / score_file("test", run.changes), run.folder.figures)
    folder = Path(arguments.out) if arguments.out else runs[0].folder.figures
    horizon = [run for run in runs if isinstance(run.data, MemoryHorizon)]
    scores = {run.name: score_by_span(run)[1] for run in horizon}
    chance = 1 / horizon[0].data.output_size if horizon else None
    files += draw_comparison(runs, scores, chance, folder)
    for file in files:
        print(file)
    return 0
