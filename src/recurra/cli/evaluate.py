"""`recurra eval`: score a run on a split."""

import sys
from argparse import Namespace

import torch
from rich.table import Table

from recurra._choices import TEMPERATURES
from recurra.cli._parsers import TRIED
from recurra.cli._tables import print_table
from recurra.train._process import chosen_device, keep_large_blocks
from recurra.train.run import DETAILS, open_run, score_run, write_scores


def evaluate(arguments: Namespace) -> int:
    device = chosen_device(arguments.device, "--device")
    keep_large_blocks()
    trained = open_run(arguments.run, checkpoint=arguments.checkpoint, overrides=arguments.overrides)
    torch.backends.cudnn.allow_tf32 = False  # as in training
    trained.model.to(device)
    temperature = arguments.temperature
    if temperature == "valid":
        temperature = trained.task.best_temperature(trained)
        if temperature in (TEMPERATURES[0], TEMPERATURES[-1]):
            print(
                f"T = {temperature:g} is at the edge of the range tried, {TRIED}; T beyond it may be better",
                file=sys.stderr,
            )
    scores = score_run(trained, arguments.split, temperature=temperature)
    write_scores(trained.folder, scores)
    table = Table("score", "value", title=trained.name, show_header=False)
    shown = {key: value for key, value in scores.items() if value not in (None, {}, []) and key not in DETAILS}
    for name, value in shown.items():
        table.add_row(name.replace("_", " "), f"{value:,.4f}" if isinstance(value, float) else str(value))
    print_table(arguments.style, [{"run": trained.name, **shown}], table)
    for path in trained.task.figures_of_scores(trained, arguments.split, scores):
        print(path, file=sys.stderr if arguments.style else sys.stdout)
    return 0
