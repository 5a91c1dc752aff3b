"""The scores of a run on a split: what `recurra eval` measures, prints and writes."""

from time import perf_counter
from typing import Any

from recurra.checks import require
from recurra.data import MemoryHorizon, Split, memory_spans
from recurra.data.tasks import TaskData
from recurra.data.video import VideoData
from recurra.evaluation import (
    AroundResets,
    EvaluationResult,
    SpanAccuracy,
    best_temperature,
    class_scores,
    classify_videos,
    evaluate,
    evaluate_by_span,
    scaled_accuracy,
)
from recurra.runs.run import Run
from recurra.training import Experiment, MemoryHorizonExperiment, TextExperiment

DETAILS = ("class_accuracies", "confusion")
"""Scores that are written and drawn, but too long to print."""


def score_run(run: Run, split: Split = "test", *, temperature: float | None = None) -> dict[str, Any]:
    """Score a run on a split, in float32, with the state carried along contiguous segments.

    Args:
        run: the run.
        split: the part of its data.
        temperature: logits are divided by it; for models of tokens. None leaves them as they are.

    Returns:
        plain data: the split, the checkpoint and its step, the overrides that changed the experiment, the lengths that
        were used, and the scores. Of videos, the scores of all views averaged.

    Raises:
        OSError: the data are not where the configuration says.
        ValueError: the split is missing or empty, or a video run has a temperature.
    """
    model, data = run.model, run.data
    if isinstance(data, VideoData):
        require(temperature is None, "temperature", temperature, "None for a run over videos")
        measured = _video_scores(run, data, split)
    else:
        divisor = 1.0 if temperature is None else temperature
        around = AroundResets(data.reset_token) if isinstance(data, MemoryHorizon) else None
        measured = evaluate(model, data.source(split), temperature=divisor, observe=around)._asdict()
        if around is not None:
            measured |= around.scores
        if isinstance(data, TaskData) and measured["accuracy"] is not None:
            measured["scaled_accuracy"] = scaled_accuracy(measured["accuracy"], data.n_answers)
    return {
        "split": split,
        "checkpoint": run.checkpoint,
        "step": run.step,
        "changes": run.changes | ({} if temperature is None else {"temperature": temperature}),
        **_lengths(run.experiment),
        **measured,
    }


def calibrated_temperature(run: Run) -> float:
    """Find the temperature, from 0.3 to 8, with which a run has the lowest loss on its validation split.

    Raises:
        OSError: the data are not where the configuration says.
        ValueError: the split is missing or empty, or it is a run over videos.
    """
    require(not isinstance(run.data, VideoData), "the run", "over videos", "one over tokens")
    return best_temperature(run.model, run.data.source("valid"))


def score_by_span(run: Run) -> tuple[EvaluationResult, SpanAccuracy]:
    """Score a Memory Horizon run on its test split, overall and by memory span.

    Raises:
        ValueError: the run is not on Memory Horizon.
    """
    run.expect(MemoryHorizonExperiment, "on Memory Horizon")
    data = run.data
    assert isinstance(data, MemoryHorizon)
    return evaluate_by_span(
        run.model, data.source("test"), lambda tokens: memory_spans(tokens, reset_token=data.reset_token)
    )


def _lengths(experiment: Experiment) -> dict[str, int]:
    """The segment and memory lengths that a model of segments was evaluated with."""
    if not isinstance(experiment, TextExperiment):
        return {}
    lengths = {"segment_length": experiment.data.segment_length}
    if hasattr(experiment.model, "mem_len"):
        memory = experiment.model.mem_len
        lengths["mem_len"] = experiment.data.segment_length if memory is None else memory
    return lengths


def _video_scores(run: Run, data: VideoData, split: Split) -> dict[str, Any]:
    """Score all views of every video of a split."""
    views = data.views(split)
    start = perf_counter()
    said = classify_videos(run.model, views)
    seconds = perf_counter() - start
    scores = class_scores(said.probabilities, said.targets)
    names = data.class_names
    seen = scores.counts > 0
    return {
        "mean_class_accuracy": scores.mean_class_accuracy,
        "top_1": scores.top_1,
        "top_5": scores.top_5,
        "n_videos": scores.n_examples,
        "n_videos_left_out": len(data.videos(split)) - scores.n_examples,
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
