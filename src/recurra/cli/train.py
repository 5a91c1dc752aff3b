"""`recurra train`: train a recipe, or resume a run."""

import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress

from recurra.cli.arguments import command_parser, split_overrides
from recurra.cli.launched import reporting_together
from recurra.train.loop import Trainer
from recurra.train.process import keep_large_blocks
from recurra.train.recipe import recipe_help
from recurra.train.start import resume_run, start_run

_DESCRIPTION = """\
Train a recipe, or resume a run that was stopped. `recurra train RECIPE --help` lists every key that the recipe may
set."""


def run(words: Sequence[str]) -> int:
    """Train; return 0, or 128 + the number of the signal that ended the run early."""
    own, overrides = split_overrides(words)
    parser = _parser()
    arguments = parser.parse_args(own)
    if arguments.help:
        print(parser.format_help(), recipe_help(arguments.recipe) if arguments.recipe else "", sep="\n")
        return 0
    _require_one_way(parser, arguments)
    keep_large_blocks()
    with reporting_together():
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
    parser.add_argument("-h", "--help", action="store_true", help="show this help, and every key of RECIPE if given")
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="a YAML file, a name that `recurra recipes` lists, or either with #VARIANT",
    )
    parser.add_argument("--run", metavar="FOLDER", help="folder to write (default: runs/ and the recipe's name)")
    parser.add_argument("--resume", metavar="RUN", help="continue the run in this folder")
    parser.add_argument(
        "--checkpoint", metavar="WHICH", help="checkpoint to --resume: last (default), previous, best or a file"
    )
    return parser


def _require_one_way(parser: ArgumentParser, arguments: Namespace) -> None:
    """Refuse arguments that contradict each other."""
    if (arguments.recipe is None) == (arguments.resume is None):
        parser.error("give either a RECIPE or --resume RUN")
    if arguments.resume and arguments.run:
        parser.error("--resume RUN continues in the run's own folder: omit --run")
    if arguments.checkpoint and not arguments.resume:
        parser.error("--checkpoint chooses what to resume: add --resume RUN")


def _result(trainer: Trainer) -> str:
    """Report a finished run, and name the next command."""
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
