"""The scores of a run over videos: what `recurra eval` measures, writes and draws."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from recurra.analysis.plots import confusion_matrix, save
from recurra.data import Split
from recurra.data.video import VideoData
from recurra.evaluation import class_scores, classify_videos
from recurra.runs import Run

DETAILS = ("class_accuracies", "confusion")
"""What is written and drawn, but too long to print."""


def score_videos(run: Run, split: Split) -> dict[str, Any]:
    """Score all views of every video of a split, as plain data.

    Raises:
        ValueError: the split has no videos.
    """
    assert isinstance(run.data, VideoData)
    views = run.data.views(split)
    start = perf_counter()
    said = classify_videos(run.model, views)
    seconds = perf_counter() - start
    scores = class_scores(said.probabilities, said.targets)
    names = run.data.class_names
    seen = scores.counts > 0
    return {
        "mean_class_accuracy": scores.mean_class_accuracy,
        "top_1": scores.top_1,
        "top_5": scores.top_5,
        "n_videos": scores.n_examples,
        "n_videos_left_out": len(run.data.videos(split)) - scores.n_examples,
        "classes_without_videos": [name for name, there in zip(names, seen.tolist()) if not there],
        "views": views.n_views,
        "crops": views.n_crops,
        "class_accuracies": {
            name: accuracy if there else None
            for name, accuracy, there in zip(names, scores.class_accuracies.tolist(), seen.tolist())
        },
        "confusion": scores.confusion.tolist(),
        "seconds": seconds,
        "frames_per_second": said.n_frames / seconds,
    }


def draw_confusion(scores: Mapping[str, Any], names: Sequence[str], folder: Path, name: str) -> list[Path]:
    """Draw the confusion matrix of what `score_videos` gave."""
    return save(confusion_matrix(torch.tensor(scores["confusion"]), names), folder, name)


def draw_written_confusion(scores: Path, folder: Path) -> list[Path]:
    """Draw the confusion matrix that `recurra eval` wrote into a file of scores.

    Raises:
        ValueError: there is no such file, or none of videos.
    """
    try:
        found = json.loads(scores.read_text(encoding="utf-8"))
        names = list(found["class_accuracies"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"there are no scores in {scores}; make them with: recurra eval {scores.parent}") from error
    return draw_confusion(found, names, folder, scores.stem.replace("eval", "confusion", 1))
