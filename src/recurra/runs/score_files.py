"""The files RUN/eval-*.json, in which `recurra eval` leaves the scores of a run."""

import json
from collections.abc import Mapping
from typing import Any

from recurra.training import RunFolder


def score_name(split: str, changes: Mapping[str, Any]) -> str:
    """Name the scores of a split by it and by what was set otherwise than in training: test-segment_length-17."""
    return "-".join([split, *(f"{key.rpartition('.')[2]}-{value}" for key, value in changes.items())])


def score_file(split: str, changes: Mapping[str, Any]) -> str:
    """Name the file of these scores in the run's folder."""
    return f"eval-{score_name(split, changes)}.json"


def read_scores(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Read all scores of a run, by their names.

    Raises:
        ValueError: a file is not what `recurra eval` writes; the message names it.
    """
    scores = {}
    for file in sorted(folder.path.glob("eval-*.json")):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            scores[file.stem.removeprefix("eval-")] = dict(found)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{file} is not what `recurra eval` writes ({error!r}): score the run again, or remove the file"
            ) from error
    return scores
