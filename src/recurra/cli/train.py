"""`recurra train`: from a recipe to a run, or on with a run that was cut short."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from recurra.cli.arguments import command_parser, split_overrides
from recurra.data import TextData
from recurra.data.files import replacing
from recurra.data.video import VideoData
from recurra.evaluation import evaluate
from recurra.training import RunFolder, Trainer, load_recipe, recipe_help, split_variant, to_yaml
from recurra.training.allocator import keep_large_blocks

DESCRIPTION = "Train a recipe. `recurra train RECIPE --help` shows every key that the recipe may set."


def run(words: Sequence[str]) -> int:
    """Train; returns 0, or 128 + the number of the signal that ended the run early."""
    own, overrides = split_overrides(words)
    parser = command_parser("train", DESCRIPTION, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="show this, and every key of the RECIPE if given")
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help="a YAML file, such as those in recipes/, or FILE#VARIANT"
    )
    parser.add_argument("--run", metavar="FOLDER", help="where to write (default: runs/ and the recipe's name)")
    parser.add_argument("--resume", metavar="RUN", help="go on with the run in this folder")
    parser.add_argument("--checkpoint", metavar="WHICH", help="with --resume: last (default), previous, best or a file")
    arguments = parser.parse_args(own)
    if arguments.help:
        print(parser.format_help(), recipe_help(arguments.recipe) if arguments.recipe else "", sep="\n")
        return 0
    if (arguments.recipe is None) == (arguments.resume is None):
        parser.error("give either a RECIPE, or --resume RUN")
    if arguments.resume and arguments.run:
        parser.error("--resume RUN goes on in the run's own folder: leave --run away")
    if arguments.checkpoint and not arguments.resume:
        parser.error("--checkpoint chooses what to --resume: give --resume RUN")
    keep_large_blocks()
    trainer = _resumed(arguments, overrides) if arguments.resume else _new(arguments, overrides)
    folder = trainer.folder.path
    Console().print(f"run folder: {folder}", markup=False, highlight=False, soft_wrap=True)
    stop = trainer.fit()
    if stop.received and not trainer.finished:
        print(
            f"stopped by {stop.received.name} at step {trainer.position.step} of {trainer.total_steps}; "
            f"go on with:\n  recurra train --resume {folder}",
            file=sys.stderr,
        )
        return 128 + stop.received
    best = trainer.scores["best"]
    accuracy = f", accuracy {best['accuracy']:.4f}" if "accuracy" in best else ""
    print(
        f"finished at step {trainer.position.step}; best validation, at step {best['step']}: loss {best['loss']:.4f}"
        f"{accuracy}; score it on the test split with:\n  recurra eval {folder}"
    )
    return 0


def default_run_folder(recipe: str) -> Path:
    """runs/<folder>-<name> for a recipe <folder>/<name>.yaml, whose name alone would clash with others', and
    runs/<folder>-<variant> for a variant of a family."""
    path, variant = split_variant(recipe)
    return Path("runs") / "-".join([path.resolve().parent.name, variant or path.stem])


def _new(arguments: Namespace, overrides: Sequence[str]) -> Trainer:
    experiment = load_recipe(arguments.recipe, overrides)
    folder = RunFolder(arguments.run or default_run_folder(arguments.recipe))
    folder.require_new()
    trainer = Trainer(experiment, folder, evaluate)
    trainer.begin()
    # Only now: a recipe that cannot be built, say for want of its corpus, leaves no run behind.
    _write_down(trainer)
    return trainer


def _resumed(arguments: Namespace, overrides: Sequence[str]) -> Trainer:
    folder = RunFolder(arguments.resume)
    folder.require_run()
    experiment = load_recipe(folder.config, overrides)
    trainer = Trainer(experiment, folder, evaluate)
    trainer.resume(arguments.checkpoint or "last")
    _write_down(trainer)
    return trainer


def _write_down(trainer: Trainer) -> None:
    """What the run is, into its folder."""
    folder = trainer.folder
    folder.write_config(to_yaml(trainer.experiment))
    if isinstance(trainer.data, TextData) and not folder.tokenizer.exists():
        trainer.data.save_tokenizer(folder.tokenizer)
    if isinstance(trainer.data, VideoData):
        with replacing(folder.classes) as file:
            file.write("".join(f"{name}\n" for name in trainer.data.class_names).encode())
