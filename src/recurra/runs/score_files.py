"""The files RUN/eval-*.json, in which `recurra eval` keeps a run's scores."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recurra.data.files import replacing
from recurra.training import RunFolder

PREFIX = "eval-"


def score_file(folder: RunFolder, split: str, changes: Mapping[str, Any]) -> Path:
    """Locate the scores of a split, measured with `changes`: RUN/eval-test-segment_length-17.json."""
    words = [split, *(f"{key.rpartition('.')[2]}-{value}" for key, value in changes.items())]
    return folder.path / f"{PREFIX}{'-'.join(words)}.json"


def write_scores(folder: RunFolder, scores: Mapping[str, Any]) -> Path:
    """Write the scores of a split, with its name and the changes among them, and return the file's path."""
    path = score_file(folder, scores["split"], scores["changes"])
    with replacing(path) as file:
        file.write((json.dumps(scores, indent=2) + "\n").encode())
    return path


def read_scores(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Read all scores of a run, by the names of their files without the prefix and suffix: test-segment_length-17.

    Raises:
        ValueError: a file is not what `recurra eval` writes; the message names it.
    """
    scores = {}
    for file in sorted(folder.path.glob(f"{PREFIX}*.json")):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            scores[file.stem.removeprefix(PREFIX)] = dict(found)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{file} is not what `recurra eval` writes ({error!r}): score the run again, or remove the file"
            ) from error
    return scores
