"""`recurra eval`: the scores of a run on a split."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from recurra.cli.arguments import command_parser, split_overrides
from recurra.cli.video_scores import DETAILS, draw_confusion, score_videos
from recurra.data import SPLITS
from recurra.data.files import replacing
from recurra.data.video import VideoData
from recurra.evaluation import evaluate
from recurra.runs import open_run
from recurra.runs.score_files import score_file
from recurra.training import Experiment, TextExperiment
from recurra.training.allocator import keep_large_blocks


def run(words: Sequence[str]) -> int:
    """Evaluate, print a table and write RUN/eval-<split>.json; other lengths than the trained ones go into its name."""
    own, overrides = split_overrides(words)
    parser = command_parser(
        "eval",
        "Score a trained run on a split, in float32, the state carried along contiguous segments. Lengths may be other "
        "than in training: --data.segment_length 17, --model.mem_len 70. Of a run over videos the views are averaged "
        "and may be others, too: --data.test_views 1, --data.test_crops 1.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("--split", choices=SPLITS, default="test", help="default: test")
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best (default), last, previous or a file"
    )
    arguments = parser.parse_args(own)
    keep_large_blocks()
    trained = open_run(arguments.run, checkpoint=arguments.checkpoint, overrides=overrides)
    if isinstance(trained.data, VideoData):
        found = score_videos(trained, arguments.split)
    else:
        found = evaluate(trained.model, trained.data.source(arguments.split))._asdict()
    scores = {
        "split": arguments.split,
        "checkpoint": arguments.checkpoint,
        "step": trained.step,
        "changes": trained.changes,
        **_lengths(trained.experiment),
        **found,
    }
    target = trained.folder.path / score_file(arguments.split, trained.changes)
    with replacing(target) as file:
        file.write((json.dumps(scores, indent=2) + "\n").encode())
    table = Table(title=trained.name, show_header=False)
    for name, value in scores.items():
        if value is None or value in ({}, []) or name in DETAILS:
            continue
        table.add_row(name.replace("_", " "), f"{value:,.4f}" if isinstance(value, float) else str(value))
    Console().print(table)
    if isinstance(trained.data, VideoData):
        name = target.stem.replace("eval", "confusion", 1)
        for path in draw_confusion(scores, trained.data.class_names, trained.folder.figures, name):
            print(path)
    return 0


def _lengths(experiment: Experiment) -> dict[str, int]:
    """The segment and the memory that a model of segments was evaluated with."""
    if not isinstance(experiment, TextExperiment):
        return {}
    lengths = {"segment_length": experiment.data.segment_length}
    if hasattr(experiment.model, "mem_len"):
        memory = experiment.model.mem_len
        lengths["mem_len"] = experiment.data.segment_length if memory is None else memory
    return lengths
