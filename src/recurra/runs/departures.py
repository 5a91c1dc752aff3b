"""Where a run departs from the recipe whose row it stands in."""

from collections.abc import Sequence
from typing import Any

from recurra.files.reading import read_json
from recurra.runs.places import PLACES
from recurra.runs.training_command import OPEN
from recurra.training import RunFolder, load_recipe
from recurra.training.experiment import RESUMABLE, differences, to_plain

LENGTH = ("averaging.start_step", "training.epochs", "training.max_steps", "training.patience", "training.stop_at")
"""How long a run lasts, and which part of it is averaged."""
_NO_DEPARTURE = (RESUMABLE - {*LENGTH}) | {*PLACES, "data.seed", "training.seed"}
"""Where things are, how often a run reports, and its random numbers: another repetition of the same experiment."""


def departures(folder: RunFolder, recipe: str) -> Sequence[str]:
    """Say in what a run differs from a recipe, in words: "model.d_model 40, not 380" or "unfinished, at step 20".

    Args:
        folder: the run's.
        recipe: a YAML file, or FILE#VARIANT.

    Raises:
        OSError: a file cannot be read.
        RecipeError: the recipe, or the run's config.yaml, is damaged.
        ValueError: the run's summary.json is damaged.
    """
    trained = to_plain(load_recipe(folder.config))
    path = trained["data"].get("path")  # which a recipe may leave to its reader
    planned = to_plain(load_recipe(recipe, ["--data.path", path] if path is not None else []))
    words = [
        f"{key} {_word(ours)}, not {_word(its)}"
        for key, (ours, its) in differences(trained, planned).items()
        if key not in _NO_DEPARTURE
        and not (key in OPEN and its == OPEN[key])
        and not (key == "data.bpe_vocab_size" and trained["data"]["tokenizer"] is not None)  # which has its size
    ]
    if folder.summary.is_file():
        summary = read_json(folder.summary)
        if not summary.get("finished", True):
            words.append(f"unfinished, at step {summary.get('steps')}")
    return words


def _word(value: Any) -> str:
    return "null" if value is None else str(value)
