"""The page's figures: each function draws summaries into a PNG and returns the Markdown line that shows it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

from recurra.analysis.plots import (
    CostPoint,
    accuracy_over_span,
    mean_gate_magnitudes,
    measured_panels,
    metric_curves,
    perplexity_over_flops,
    save_png,
)
from recurra.evaluation import SpanAccuracy
from recurra.report.tables import require_runs
from recurra.runs.summary import Summary

SMOOTHING = 9
"""Neighbouring spans whose positions are pooled for a point of the accuracy over the memory span."""


class Figures:
    """What sections draw.

    Args:
        folder: where the files go; None draws nothing, and the lines are the same.
        link: the folder as the page names it.
    """

    def __init__(self, folder: Path | None, *, link: str = "figures") -> None:
        self.folder, self.link = folder, link
        self.written: list[Path] = []

    def curves(
        self, runs: Sequence[Summary], name: str, title: str, *, panels: Mapping[str, Sequence[str]] = {}
    ) -> str:
        """Losses and, where they were measured, perplexity and accuracy over the steps, with ticks where a run was
        interrupted and resumed. `panels`: other ones, columns by title."""
        labels = short_names(runs)
        rows = {labels[run.name]: run.rows() for run in runs}
        marks = {labels[run.name]: run.resumed_at for run in runs}
        return self._shown(metric_curves(rows, panels or measured_panels(rows), marks=marks), name, title)

    def spans(self, runs: Sequence[Summary], name: str, title: str) -> str:
        """Accuracy over the memory span (Figure 7 of GateLoop), of runs on Memory Horizon."""
        labels = short_names(runs)
        counted = {}
        for run in runs:
            if run.spans is None:
                raise ValueError(f"{run.name} has no accuracy by memory span: it is no run on Memory Horizon")
            n_correct, counts = (torch.tensor(run.spans[key]) for key in ("n_correct", "counts"))
            counted[labels[run.name]] = SpanAccuracy(torch.arange(len(counts) + 1), n_correct, counts)
        moduli = {run.value("data.modulus") for run in runs}
        chance = 1 / moduli.pop() if len(moduli) == 1 else None
        return self._shown(accuracy_over_span(counted, smoothing=SMOOTHING, chance=chance), name, title)

    def gates(self, run: Summary, name: str, title: str) -> str:
        """Mean |a| of each layer over a test sequence, its resets marked (the means of Figure 5 of GateLoop)."""
        if run.gates is None:
            raise ValueError(f"{run.name} has no gates that depend on the data, or is no run on Memory Horizon")
        means = torch.tensor(run.gates["means"]).T
        figure = mean_gate_magnitudes(means, layers=run.gates["layers"], resets=run.gates["resets"])
        return self._shown(figure, name, title)

    def perplexity_over_flops(self, runs: Sequence[Summary], name: str, title: str) -> str:
        """Test perplexity over what a segment costs (Figure 5 of the CRT paper), a curve for each kind of model,
        and for each depth and number of epochs where they differ."""
        curves: dict[str, list[CostPoint]] = {}
        require_runs(runs)
        depths = {run.cost["n_layer"] for run in runs if run.cost}
        lengths = {f"{run.epochs:.3g}" for run in runs}
        for run in runs:
            perplexity = run.score("perplexity")
            if run.cost is None or perplexity is None:
                raise ValueError(f"{run.name} has no {'test perplexity' if run.cost else 'counted FLOPs'}")
            layers = f", {run.cost['n_layer']} layers" if len(depths) > 1 else ""
            trained = f", {run.epochs:.3g} epochs" if len(lengths) > 1 else ""
            point = CostPoint(run.cost["segment_length"], run.cost["measured"]["block_flops"], perplexity)
            curves.setdefault(run.cost["kind"] + layers + trained, []).append(point)
        return self._shown(perplexity_over_flops(curves), name, title)

    def _shown(self, figure: Figure, name: str, title: str) -> str:
        if self.folder is not None:
            self.written.append(save_png(figure, self.folder, name))
        return f"![{title}]({self.link}/{name}.png)"


def short_names(runs: Sequence[Summary]) -> dict[str, str]:
    """What a legend calls runs, by their names: without the words that all of them begin with.

    Raises:
        ValueError: there are none.
    """
    require_runs(runs)
    words = [run.name.split("-") for run in runs]
    # The last word of a name stays, whatever the others are.
    columns = list(zip(*(some[:-1] for some in words))) if len(runs) > 1 else []
    n_shared = next((place for place, column in enumerate(columns) if len(set(column)) > 1), len(columns))
    return {run.name: "-".join(some[n_shared:]) for run, some in zip(runs, words)}
