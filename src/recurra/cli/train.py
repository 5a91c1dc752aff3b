"""`recurra train` and `recurra recipes`: train a recipe, resume a run, or list what can be trained."""

import itertools
import math
import re
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from recurra._files.reading import read_text, read_yaml
from recurra.cli.arguments import command_parser, split_overrides
from recurra.train._process import is_first_launched, keep_large_blocks, n_launched
from recurra.train.loop import Trainer
from recurra.train.recipe import find_recipe, recipe_help, recipe_names
from recurra.train.run import resume_run, start_run

_DESCRIPTION = """\
Train a recipe, or resume a run that was stopped. `recurra train RECIPE --help` lists every key that the recipe may
set."""


def train(words: Sequence[str]) -> int:
    """Train; return 0, or 128 + the number of the signal that ended the run early."""
    own, overrides = split_overrides(words)
    parser = _parser()
    arguments = parser.parse_args(own)
    if arguments.help:
        print(parser.format_help(), recipe_help(arguments.recipe) if arguments.recipe else "", sep="\n")
        return 0
    if (arguments.recipe is None) == (arguments.resume is None):
        parser.error("give either a RECIPE or --resume RUN")
    if arguments.resume and arguments.run:
        parser.error("--resume RUN continues in the run's own folder: omit --run")
    if arguments.checkpoint and not arguments.resume:
        parser.error("--checkpoint chooses what to resume: add --resume RUN")
    keep_large_blocks()
    with _reporting_together():
        return _train(arguments, overrides)


def _train(arguments: Namespace, overrides: Sequence[str]) -> int:
    if arguments.resume:
        trainer = resume_run(arguments.resume, checkpoint=arguments.checkpoint or "last", overrides=overrides)
    else:
        trainer = start_run(arguments.recipe, arguments.run, overrides)
    folder = trainer.folder.path
    speaks = trainer.ranks.is_first
    if speaks:
        print(f"run folder: {folder}")
        if cache := getattr(trainer.data, "cache_folder", None):  # data that are generated have none
            print(f"cache folder: {cache}", flush=True)
    stop = trainer.fit()
    if not trainer.finished:
        received = stop.received or signal.SIGTERM  # another rank may have got it
        with suppress(OSError) if speaks else redirect_stderr(None):  # of a closed terminal
            print(
                f"stopped by {received.name} at step {trainer.position.step} of {trainer.total_steps}; "
                f"continue with:\n  recurra train --resume {folder}",
                file=sys.stderr,
            )
        return 128 + received
    if speaks:
        print(_result(trainer))
    return 0


def _parser() -> ArgumentParser:
    parser = command_parser("train", _DESCRIPTION, add_help=False)
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this help, and every key of RECIPE if given")
    add(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="a YAML file, a name that `recurra recipes` lists, or either with #VARIANT",
    )
    add("--run", metavar="FOLDER", help="folder to write (default: runs/ and the recipe's name)")
    add("--resume", metavar="RUN", help="continue the run in this folder")
    add("--checkpoint", metavar="WHICH", help="checkpoint to --resume: last (default), previous, best or a file")
    return parser


def _result(trainer: Trainer) -> str:
    best = trainer.scores.get("best")
    if best is None:  # resumed with an end that it had reached
        return (
            f"finished at step {trainer.position.step}, without a validation; score its last checkpoint with:\n"
            f"  recurra eval {trainer.folder.path} --checkpoint last"
        )
    accuracy = f", accuracy {best['accuracy']:.4f}" if "accuracy" in best else ""
    return (
        f"finished at step {trainer.position.step}; best validation at step {best['step']}: loss {best['loss']:.4f}"
        f"{accuracy}; score it on the test split with:\n  recurra eval {trainer.folder.path}"
    )


_WAIT = 1.0
"""Seconds that other ranks wait before they report: an error of all ranks has then been reported by the first, and
torchrun has ended them."""


class _AnotherRankEnded(OSError):
    """This rank cannot go on because another one ended."""


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
            raise _AnotherRankEnded("another rank ended, and its message says why") from error
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


def recipes(words: Sequence[str]) -> int:
    parser = command_parser(
        "recipes",
        "List the recipes that come with Recurra: `recurra train NAME` trains one. With a NAME, print that recipe; to "
        "change it, write it into a file of your own, `recurra recipes NAME > mine.yaml`.",
        overrides=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe to print, such as ptb/gateloop")
    name = parser.parse_args(words).name
    if name is not None:
        print(read_text(find_recipe(name)), end="")
        return 0
    console = Console(markup=False)
    if not console.is_terminal:
        console = Console(width=120, markup=False)
    table = Table("name", "variants", "what it is")
    for recipe in recipe_names():
        path = find_recipe(recipe)
        axes = read_yaml(path).get("axes", {})  # of a family
        comment = itertools.takewhile(lambda line: line.strip("# "), read_text(path).splitlines())
        first_sentence = re.split(r"(?<!et al)\. ", " ".join(line.removeprefix("# ") for line in comment))[0].rstrip(
            "."
        )
        table.add_row(recipe, str(math.prod(map(len, axes.values()))) if axes else "", first_sentence)
    console.print(table)
    return 0
