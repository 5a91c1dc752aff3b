"""The scores of a run on a split: what `recurra eval` measures, prints and writes."""

from typing import Any

from recurra.data import Split
from recurra.evaluation import EvaluationResult, SpanAccuracy
from recurra.runs.run import Run

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
    measured = run.task.score(run, split, temperature)
    return {
        "split": split,
        "checkpoint": run.checkpoint,
        "step": run.step,
        "changes": run.changes | ({} if temperature is None else {"temperature": temperature}),
        **run.task.lengths(run.experiment),
        **measured,
    }


def calibrated_temperature(run: Run) -> float:
    """Find the temperature, from 0.3 to 8, with which a run has the lowest loss on its validation split.

    Raises:
        OSError: the data are not where the configuration says.
        ValueError: the split is missing or empty, or it is a run over videos.
    """
    return run.task.best_temperature(run)


def score_by_span(run: Run) -> tuple[EvaluationResult, SpanAccuracy]:
    """Score a Memory Horizon run on its test split, overall and by memory span.

    Raises:
        ValueError: the run is not on Memory Horizon.
    """
    scores: tuple[EvaluationResult, SpanAccuracy] = run.task.score_by_span(run)
    return scores
