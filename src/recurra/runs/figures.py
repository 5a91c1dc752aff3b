"""The figures of trained runs, as PNG and SVG: the papers' figures, learning curves, confusion matrices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recurra.analysis import GateRecord, record_gates
from recurra.analysis.plots import (
    accuracy_over_span,
    gate_magnitudes,
    gate_phases,
    magnitude_activations,
    measured_panels,
    metric_curves,
    save,
)
from recurra.checks import sentence
from recurra.evaluation import SpanAccuracy
from recurra.runs.run import Run
from recurra.runs.score_files import AGAIN, find_scores, staleness
from recurra.runs.scores import score_by_span
from recurra.training import read_metrics

SMOOTHING = 9
"""Neighbouring spans whose positions are pooled into one point of Figure 7."""


def draw_runs(runs: Sequence[Run], folder: Path | None = None) -> list[Path]:
    """Draw each run's gates or confusion matrix into its own folder, and what compares the runs into one folder.

    Args:
        runs: at least one, of different names.
        folder: for the figures of all runs; None is the first run's folder of figures.

    Returns:
        the files.

    Raises:
        ValueError: two runs have the same name, or a video run has not been scored.
    """
    require_different_names(runs)
    # Measure everything before anything is drawn: a run that cannot be read then leaves no figures of the others.
    gates = {run.name: gates_of(run) for run in runs}
    spans = {run.name: score_by_span(run)[1] for run in runs if run.task.has_spans}
    scores = {run.name: _drawn_scores(run) for run in runs if run.task.drawn_scores}
    metrics = _curves(runs)
    files = [file for run in runs for file in draw_gates(run, gates[run.name])]
    for run in runs:
        if run.name in scores:
            files += run.task.figures_of_scores(run, "test", scores[run.name])
    return files + draw_comparison(runs, spans, folder or runs[0].folder.figures, metrics=metrics)


def require_different_names(runs: Sequence[Run]) -> None:
    """Refuse runs of the same name, which a table or figure could not tell apart.

    Raises:
        ValueError: naming all of them.
    """
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(sentence("runs", f"several with the names {', '.join(names)}", "folders with different names"))


def _drawn_scores(run: Run) -> dict[str, Any]:
    """Read scores; refuse those of another checkpoint than the run was opened with, and outdated ones."""
    scores = find_scores(run.folder, "test", run.changes, *run.task.drawn_scores)
    scored = scores.get("checkpoint", run.checkpoint)
    if scored != run.checkpoint:
        came = f"scored with the checkpoint {scored}"
        raise ValueError(sentence(str(run.folder.path), came, f"scores of {run.checkpoint}", AGAIN))
    if stale := staleness(run.folder, scores):
        raise ValueError(f"{run.folder.path} was {stale}: {AGAIN}")
    return scores


def gates_of(run: Run) -> GateRecord | None:
    """Record a model's gates over the first whole test sequence; None for a model without gates."""
    if not any(hasattr(module, "transition") for module in run.model.modules()):
        return None
    return record_gates(run.model, run.task.gate_tokens(run.data.source("test").batch(0, 0)))


def draw_gates(run: Run, record: GateRecord | None) -> list[Path]:
    """Draw Figures 5 and 8 of GateLoop: the magnitudes and phases of the gates over a test sequence."""
    if record is None:
        return []
    return [
        *save(gate_magnitudes(record, reset_token=run.task.reset_token(run)), run.folder.figures, "gate-magnitudes"),
        *save(gate_phases(record), run.folder.figures, "gate-phases"),
    ]


def draw_comparison(
    runs: Sequence[Run],
    spans: Mapping[str, SpanAccuracy],
    folder: Path,
    *,
    metrics: Mapping[str, list[dict[str, Any]]] | None = None,
) -> list[Path]:
    """Draw what compares runs: their curves, Figure 4 unless all are over videos, and Figure 7 if there are spans.

    spans: accuracy by memory span, by the run's name. metrics: the runs' logs, by the same; None reads them.
    """
    metrics = _curves(runs) if metrics is None else metrics
    files = save(metric_curves(metrics, measured_panels(metrics)), folder, "curves") if metrics else []
    if any(run.task.has_gates for run in runs):
        files += save(magnitude_activations(), folder, "magnitude-activations")
    if spans:
        chances = {1 / run.data.output_size for run in runs if run.name in spans}
        chance = chances.pop() if len(chances) == 1 else None
        files += save(accuracy_over_span(spans, smoothing=SMOOTHING, chance=chance), folder, "accuracy-by-span")
    return files


def _curves(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """The logs of the runs that have records: one that was converted, or killed before its first record, has none."""
    rows = {run.name: curve_rows(run) for run in runs if run.folder.metrics.is_file()}
    return {name: records for name, records in rows.items() if records}


def curve_rows(run: Run) -> list[dict[str, Any]]:
    """Read a run's log, with what else its curves show: the perplexity of a text run."""
    rows = read_metrics(run.folder.metrics)
    run.task.curve(rows)
    return rows
