"""The files RUN/eval-*.json, in which `recurra eval` keeps a run's scores."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recurra.checks import sentence
from recurra.files.writing import replacing
from recurra.training import RunFolder

PREFIX = "eval-"
AGAIN = "score the run again, or remove the file"


def score_file(folder: RunFolder, split: str, changes: Mapping[str, Any]) -> Path:
    """Locate the scores of a split, measured with `changes`: RUN/eval-test-segment_length-17.json."""
    words = [split, *(f"{key.rpartition('.')[2]}-{value}" for key, value in changes.items())]
    words = [re.sub(r"[/\\]", "-", word) for word in words]  # a value can be a path; the file stays in the folder
    return folder.path / f"{PREFIX}{'-'.join(words)}.json"


def write_scores(folder: RunFolder, scores: Mapping[str, Any]) -> Path:
    """Write the scores of a split, with its name and the changes among them, and return the file's path."""
    path = score_file(folder, scores["split"], scores["changes"])
    with replacing(path) as file:
        file.write((json.dumps(scores, indent=2) + "\n").encode())
    return path


def find_scores(folder: RunFolder, split: str, changes: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Read the scores of a split, measured with `changes`, that have values for `keys`.

    Raises:
        ValueError: there are none; the message says how to measure them.
    """
    file = score_file(folder, split, changes)
    try:
        scores = dict(json.loads(file.read_text(encoding="utf-8")))
        if missing := [key for key in keys if scores.get(key) is None]:
            raise KeyError(*missing)
    except (OSError, ValueError, KeyError, TypeError) as error:
        command = " ".join(["recurra eval", str(folder.path), *(f"--{key} {value}" for key, value in changes.items())])
        came = f"{file}, which does not have {' and '.join(keys) or 'them'}"
        raise ValueError(sentence("scores", came, "those of a run", f"score it first with\n  {command}")) from error
    return scores


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
                sentence("scores", f"{file}, which is damaged ({error})", "a file of `recurra eval`", AGAIN)
            ) from error
    return scores
