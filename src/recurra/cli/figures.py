"""The papers' figures from trained runs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from recurra.analysis import record_gates
from recurra.analysis.plots import (
    accuracy_over_span,
    gate_magnitudes,
    gate_phases,
    magnitude_activations,
    measured_panels,
    metric_curves,
    save,
)
from recurra.data import MemoryHorizon, TextData, memory_spans
from recurra.evaluation import EvaluationResult, SpanAccuracy, evaluate_by_span
from recurra.runs import Run
from recurra.training import VideoExperiment, read_metrics

SMOOTHING = 9
"""Neighbouring spans whose positions are pooled for a point of Figure 7."""


def score_by_span(run: Run) -> tuple[EvaluationResult, SpanAccuracy]:
    """The test scores of a Memory Horizon run, overall and by memory span."""
    data = run.data
    assert isinstance(data, MemoryHorizon)
    return evaluate_by_span(
        run.model, data.source("test"), lambda tokens: memory_spans(tokens, reset_token=data.reset_token)
    )


def draw_gates(run: Run) -> list[Path]:
    """Figures 5 and 8: the gates over the first test sequence, where the model has gates."""
    if not any(hasattr(module, "transition") for module in run.model.modules()):
        return []
    record = record_gates(run.model, run.data.source("test").batch(0, 0).inputs[:1])
    reset_token = run.data.reset_token if isinstance(run.data, MemoryHorizon) else None
    return [
        *save(gate_magnitudes(record, reset_token=reset_token), run.folder.figures, "gate-magnitudes"),
        *save(gate_phases(record), run.folder.figures, "gate-phases"),
    ]


def draw_comparison(
    runs: Sequence[Run], scores: Mapping[str, SpanAccuracy], chance: float | None, folder: Path
) -> list[Path]:
    """What several runs share: the curves of losses and accuracy, Figure 4 unless all are over videos, and Figure 7
    where there are spans."""
    metrics = {run.name: curve_rows(run) for run in runs}
    files = save(metric_curves(metrics, measured_panels(metrics)), folder, "curves")
    if not all(isinstance(run.experiment, VideoExperiment) for run in runs):
        files += save(magnitude_activations(), folder, "magnitude-activations")
    if scores:
        files += save(accuracy_over_span(scores, smoothing=SMOOTHING, chance=chance), folder, "accuracy-by-span")
    return files


def curve_rows(run: Run) -> list[dict[str, str]]:
    """The rows of a run's log; those of a text with the perplexity, which is what people know a text's loss by."""
    rows = read_metrics(run.folder.metrics)
    if isinstance(run.data, TextData):
        for row in rows:
            row["valid_perplexity"] = str(math.exp(float(row["valid_loss"]))) if row["valid_loss"] else ""
    return rows
