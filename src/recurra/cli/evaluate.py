"""`recurra eval`: score a run on a split."""

import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from recurra.cli.arguments import add_checkpoint, add_device, command_parser, split_overrides
from recurra.data.batches import SPLITS
from recurra.train._process import chosen_device, keep_large_blocks
from recurra.train.evaluate import TEMPERATURES
from recurra.train.run import DETAILS, open_run, score_run, write_scores

_DESCRIPTION = """\
Score a trained run on a split, in float32, with the state carried along contiguous segments. Prints a table, and writes
RUN/eval-SPLIT.json.

Lengths may differ from those of training: --data.segment_length 17, --model.mem_len 70. For a video run the scores of
all views are averaged, and their number may differ too: --data.test_views 1, --data.test_crops 1. Values that differ
become part of the file's name.

A text can also be scored in windows that overlap, which gives every token a long context and takes as much longer:
--data.eval_stride 10 --data.eval_context 130 --data.eval_batch_size 32."""
_TRIED = f"{TEMPERATURES[0]:g} to {TEMPERATURES[-1]:g}"
"""The temperatures that `--temperature valid` chooses from."""


def evaluate(words: Sequence[str]) -> int:
    own, overrides = split_overrides(words)
    parser = command_parser("eval", _DESCRIPTION)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of the run")
    add("--split", choices=SPLITS, default="test", help="split to score (default: test)")
    add(
        "--temperature",
        metavar="T",
        type=_temperature,
        help=f"divide the logits by T; `valid` first finds the T from {_TRIED} with the lowest validation loss",
    )
    add_device(parser, "score", default="auto")
    add_checkpoint(parser)
    arguments = parser.parse_args(own)
    device = chosen_device(arguments.device, "--device")
    keep_large_blocks()
    trained = open_run(arguments.run, checkpoint=arguments.checkpoint, overrides=overrides)
    torch.backends.cudnn.allow_tf32 = False  # as in training
    trained.model.to(device)
    temperature = arguments.temperature
    if temperature == "valid":
        temperature = trained.task.best_temperature(trained)
        if temperature in (TEMPERATURES[0], TEMPERATURES[-1]):
            print(
                f"T = {temperature:g} is an end of what was tried, {_TRIED}: a better T may lie beyond", file=sys.stderr
            )
    scores = score_run(trained, arguments.split, temperature=temperature)
    write_scores(trained.folder, scores)
    table = Table(title=trained.name, show_header=False)
    for name, value in scores.items():
        if value is not None and value not in ({}, []) and name not in DETAILS:
            table.add_row(name.replace("_", " "), f"{value:,.4f}" if isinstance(value, float) else str(value))
    Console(markup=False).print(table)
    for path in trained.task.figures_of_scores(trained, arguments.split, scores):
        print(path)
    return 0


def _temperature(word: str) -> float | str:
    if word == "valid":
        return word
    try:
        temperature = float(word)
    except ValueError:
        temperature = 0.0
    if not 0 < temperature < float("inf"):
        raise ArgumentTypeError(f"{word!r}; expected a number above 0, or valid")
    return temperature
