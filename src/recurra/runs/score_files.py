"""The files RUN/eval-*.json, in which `recurra eval` keeps a run's scores."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recurra.checks import sentence
from recurra.files.reading import read_json, require_fields
from recurra.files.writing import write_json
from recurra.training import RunFolder

PREFIX = "eval-"
AGAIN = "score the run again, or remove the file"
_TYPES = {
    "split": str,
    "checkpoint": str,
    "step": int,
    "changes": dict[str, Any],
    "segment_length": int,
    "mem_len": int,
    "loss": float,
    "perplexity": float,
    "bits_per_token": float,
    "accuracy": float | None,
    "scaled_accuracy": float,
    "n_targets": int,
    "seconds": float,
    "tokens_per_second": float,
    "frames_per_second": float,
    "mean_class_accuracy": float,
    "top_1": float,
    "top_5": float | None,
    "n_videos": int,
    "n_videos_left_out": int,
    "classes_without_videos": list[str],
    "views": int,
    "crops": int,
    "class_accuracies": dict[str, float | None],
    "confusion": list[list[int]],
}


def score_file(folder: RunFolder, split: str, changes: Mapping[str, Any]) -> Path:
    """Locate the scores of a split, measured with `changes`: RUN/eval-test-segment_length-17.json."""
    words = [split, *(f"{key.rpartition('.')[2]}-{value}" for key, value in changes.items())]
    words = [re.sub(r"[/\\]", "-", word) for word in words]  # a value can be a path; the file stays in the folder
    return folder.path / f"{PREFIX}{'-'.join(words)}.json"


def write_scores(folder: RunFolder, scores: Mapping[str, Any]) -> Path:
    """Write the scores of a split, with its name and the changes among them, and return the file's path."""
    path = score_file(folder, scores["split"], scores["changes"])
    write_json(path, scores)
    return path


def staleness(folder: RunFolder, scores: Mapping[str, Any]) -> str:
    """Say of which step scores are, if the run has gone on since; empty if they are of the checkpoint as it is now."""
    if not folder.summary.is_file():
        return ""
    summary = folder.read_summary()
    best = summary["validation"].get("best", {}).get("step")
    now = {"best": best, "last": summary["steps"]}.get(scores.get("checkpoint", ""))
    if now is None or now == scores.get("step"):
        return ""
    return f"scored at step {scores['step']}; its {scores['checkpoint']} checkpoint is now of step {now}"


def find_scores(folder: RunFolder, split: str, changes: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Read the scores of a split, measured with `changes`, that have values for `keys`.

    Raises:
        ValueError: there are none, or the file is damaged; the message says how to measure them.
    """
    file = score_file(folder, split, changes)
    came = f"{file}, which does not have {' and '.join(keys) or 'them'}"
    scores: dict[str, Any] = {}
    if file.is_file():
        try:
            scores = _read(file)
        except ValueError as error:
            came = f"{file}, which is damaged ({error})"
    if not scores or any(scores.get(key) is None for key in keys):
        words = ["recurra", "eval", str(folder.path)]
        for key, value in changes.items():
            words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
        command = shlex.join(words)
        raise ValueError(sentence("scores", came, "those of a run", f"score it first with\n  {command}"))
    return scores


def read_scores(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Read all scores of a run, by the names of their files without the prefix and suffix: test-segment_length-17.

    Raises:
        ValueError: a file is not what `recurra eval` writes; the message names it.
    """
    return {file.stem.removeprefix(PREFIX): _read(file) for file in sorted(folder.path.glob(f"{PREFIX}*.json"))}


def _read(file: Path) -> dict[str, Any]:
    # What could not be measured may be NaN, and the perplexity of a bad model infinite.
    scores = read_json(file, "the file of scores", allow_nan=True, mend=AGAIN)
    require_fields(scores, _TYPES, str(file), finite=False)
    return scores
