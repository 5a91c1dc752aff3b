"""`recurra rates`: the learning-rate range test."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from recurra.cli.arguments import command_parser, split_overrides
from recurra.evaluation import evaluate
from recurra.training import RunFolder, Trainer, load_recipe
from recurra.training.rate_finder import find_rate

DESCRIPTION = """\
Train a recipe for some steps while its learning rates grow from a thousandth to a hundred times, print the loss at
each, and name the rate at which it fell fastest. A good peak is somewhat above that. Nothing is kept."""


def run(words: Sequence[str]) -> int:
    """Test, and print the rates."""
    own, overrides = split_overrides(words)
    parser = command_parser("rates", DESCRIPTION)
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or FILE#VARIANT")
    parser.add_argument("--steps", type=int, default=100, help="updates (default: 100)")
    arguments = parser.parse_args(own)
    experiment = load_recipe(arguments.recipe, overrides)
    rate = experiment.optimizer.learning_rate
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(experiment, RunFolder(Path(folder)), evaluate)
        trainer.begin()
        found = find_rate(trainer, n_steps=arguments.steps)
    for factor, loss in zip(found.factors, found.losses):
        print(f"{rate * factor:.3g}  loss {loss:.4f}")
    print(f"the loss fell fastest at {rate * found.steepest:.3g}; the recipe has {rate:.3g}")
    return 0
