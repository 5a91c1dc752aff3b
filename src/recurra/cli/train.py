"""`recurra train`, `eval` and `recipes`: train a recipe, resume or score a run, or list what can be trained."""

import itertools
import math
import re
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from recurra._choices import TEMPERATURES
from recurra._files.reading import read_text, read_yaml
from recurra._process import chosen_device, is_first_launched, keep_large_blocks, n_launched
from recurra.cli._parsers import TRIED
from recurra.cli._tables import print_table
from recurra.data.text import TextData
from recurra.train.loop import Trainer
from recurra.train.recipe import find_recipe, recipe_help, recipe_names
from recurra.train.run import DETAILS, open_run, resume_run, score_run, start_run, write_scores


def train(arguments: Namespace) -> int:
    """Train; return 0, or 128 + the number of the signal that ended the run early."""
    if arguments.help:
        print(arguments.help, recipe_help(arguments.recipe), sep="\n")
        return 0
    keep_large_blocks()
    with _reporting_together():
        return _train(arguments)


def _train(arguments: Namespace) -> int:
    if arguments.resume:
        trainer = resume_run(arguments.resume, checkpoint=arguments.checkpoint or "last", overrides=arguments.overrides)
    else:
        trainer = start_run(arguments.recipe, arguments.run_dir, arguments.overrides)
    folder = trainer.folder
    speaks = trainer.ranks.is_first
    if speaks:
        print(f"run folder: {folder.path}")
        if cache := getattr(trainer.data, "cache_folder", None):  # data that are generated have none
            print(f"cache folder: {cache}", flush=True)
        if isinstance(trainer.data, TextData) and trainer.data.corpus.note:
            print(trainer.data.corpus.note, flush=True)
    stop = trainer.fit()
    if not trainer.finished:
        received = stop.received or signal.SIGTERM  # another rank may have got it
        with suppress(OSError) if speaks else redirect_stderr(None):  # of a closed terminal
            print(
                f"stopped by {received.name} at step {trainer.position.step} of {trainer.total_steps}; "
                f"continue with:\n  recurra train --resume {folder.quoted}",
                file=sys.stderr,
            )
        return 128 + received
    if speaks:
        print(_result(trainer))
    return 0


def _result(trainer: Trainer) -> str:
    best = trainer.scores.get("best")
    if best is None:  # resumed with an end that it had reached
        return (
            f"finished at step {trainer.position.step}, without a validation; score its last checkpoint with:\n"
            f"  recurra eval {trainer.folder.quoted} --checkpoint last"
        )
    accuracy = f", accuracy {best['accuracy']:.4f}" if "accuracy" in best else ""
    return (
        f"finished at step {trainer.position.step}; best validation at step {best['step']}: loss {best['loss']:.4f}"
        f"{accuracy}; score it on the test split with:\n  recurra eval {trainer.folder.quoted}{_continuing(trainer)}"
    )


def _continuing(trainer: Trainer) -> str:
    """Say how to generate with a model that continues texts."""
    if not isinstance(trainer.data, TextData):
        return ""
    return f'\nand generate text with:\n  recurra generate {trainer.folder.quoted} --prompt "..."'


_WAIT = 1.0
"""Seconds that other ranks wait before they report: an error of all ranks has then been reported by the first, and
torchrun has ended them."""


class _AnotherRankEnded(OSError):
    """This rank cannot continue because another one ended."""


@contextmanager
def _reporting_together() -> Iterator[None]:
    """Let the rank with the first error report it, to the terminal and to torchrun, and end the others."""
    if n_launched() == 1:
        yield
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        yield
    except Exception as error:
        if _is_lost_connection(error):
            time.sleep(3 * _WAIT)  # torchrun shall see the other one first
            raise _AnotherRankEnded("another rank failed; its message says why") from error
        handler.record_exception(error)
        if not is_first_launched():
            time.sleep(_WAIT)
        raise
    if dist.is_initialized():  # threads of a group that is left over can abort the interpreter when it ends
        dist.destroy_process_group()


def _is_lost_connection(error: BaseException) -> bool:
    text = str(error)
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "NCCL error")
    return isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text) and any(x in text for x in lost)


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


def recipes(arguments: Namespace) -> int:
    if arguments.name is not None:
        print(read_text(find_recipe(arguments.name)), end="")
        return 0
    console = Console(markup=False)
    if not console.is_terminal:
        console = Console(width=120, markup=False)
    table = Table("name", "variants", "what it is")
    for recipe in recipe_names():
        path = find_recipe(recipe)
        axes = read_yaml(path).get("axes", {})  # of a family
        comment = itertools.takewhile(lambda line: line.strip("# "), read_text(path).splitlines())
        text = " ".join(line.removeprefix("# ") for line in comment)
        first_sentence = re.split(r"(?<!et al)\. ", text)[0].rstrip(".")
        table.add_row(recipe, str(math.prod(map(len, axes.values()))) if axes else "", first_sentence)
    console.print(table)
    return 0
