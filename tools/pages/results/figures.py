"""Figures of the page of results: each method draws summaries, and returns the Markdown that shows the figure."""

from collections.abc import Mapping, Sequence

import torch

from recurra.analysis.plots import (
    CostPoint,
    accuracy_over_length,
    accuracy_over_span,
    mean_gate_magnitudes,
    measured_panels,
    metric_curves,
    perplexity_over_flops,
)
from recurra.checks import sentence
from recurra.evaluation import SpanAccuracy
from recurra.runs.summary import Summary
from tools.pages.figures import Figures
from tools.pages.results.tables import require_runs, scores_by_length

SMOOTHING = 9
"""Neighbouring spans whose positions are pooled into one point of the accuracy over the memory span."""


class RunFigures(Figures):
    """What sections may draw of runs."""

    def curves(
        self, runs: Sequence[Summary], name: str, title: str, *, panels: Mapping[str, Sequence[str]] = {}
    ) -> str:
        """Draw losses and, if measured, perplexity and accuracy over the steps, with ticks where runs resumed.

        panels: others instead, as columns by title.
        """
        labels = short_names(runs)
        rows = {labels[run.name]: run.rows() for run in runs}
        marks = {labels[run.name]: run.resumed_at for run in runs}
        return self.show(metric_curves(rows, panels or measured_panels(rows), marks=marks), name, title)

    def spans(self, runs: Sequence[Summary], name: str, title: str) -> str:
        """Draw accuracy over the memory span (Figure 7 of GateLoop) for runs on Memory Horizon."""
        labels = short_names(runs)
        counted = {}
        for run in runs:
            if run.spans is None:
                raise ValueError(sentence("run", f"{run.name}, which has no memory spans", "one on Memory Horizon"))
            n_correct, counts = (torch.tensor(run.spans[key]) for key in ("n_correct", "counts"))
            counted[labels[run.name]] = SpanAccuracy(torch.arange(len(counts) + 1), n_correct, counts)
        moduli = {run.value("data.modulus") for run in runs}
        chance = 1 / moduli.pop() if len(moduli) == 1 else None
        return self.show(accuracy_over_span(counted, smoothing=SMOOTHING, chance=chance), name, title)

    def lengths(self, runs: Sequence[Summary], name: str, title: str, *, chance: float | None = None) -> str:
        """Draw accuracy over the length of test sequences, for runs on a generated task scored at several lengths.

        chance: the accuracy of guesses, marked by a line.
        """
        labels = short_names(runs)
        curves = {labels[run.name]: list(scores_by_length(run).items()) for run in runs}
        trained = [run.value("data.final_length") or run.value("data.max_length") for run in runs]
        return self.show(accuracy_over_length(curves, trained=trained, chance=chance), name, title)

    def gates(self, run: Summary, name: str, title: str) -> str:
        """Draw the mean |a| of each layer over a test sequence, resets marked (the means of Figure 5 of GateLoop)."""
        if run.gates is None:
            came = f"{run.name}, which has no gates that depend on the data"
            raise ValueError(sentence("run", came, "one on Memory Horizon that has"))
        means = torch.tensor(run.gates["means"]).T
        figure = mean_gate_magnitudes(means, layers=run.gates["layers"], resets=run.gates["resets"])
        return self.show(figure, name, title)

    def perplexity_over_flops(self, runs: Sequence[Summary], name: str, title: str) -> str:
        """Draw test perplexity over the FLOPs of a segment (Figure 5 of the CRT paper).

        Each kind of model has a curve, and so has each depth and number of epochs if they differ.
        """
        curves: dict[str, list[CostPoint]] = {}
        require_runs(runs)
        depths = {run.cost["n_layer"] for run in runs if run.cost}
        lengths = {f"{run.epochs:.3g}" for run in runs}
        for run in runs:
            perplexity = run.score("perplexity")
            if run.cost is None or perplexity is None:
                came = f"{run.name}, which has no {'test perplexity' if run.cost else 'counted FLOPs'}"
                raise ValueError(sentence("run", came, "a scored run over text"))
            layers = f", {run.cost['n_layer']} layers" if len(depths) > 1 else ""
            trained = f", {run.epochs:.3g} epochs" if len(lengths) > 1 else ""
            point = CostPoint(run.cost["segment_length"], run.cost["measured"]["block_flops"], perplexity)
            curves.setdefault(run.cost["kind"] + layers + trained, []).append(point)
        return self.show(perplexity_over_flops(curves), name, title)


def short_names(runs: Sequence[Summary]) -> dict[str, str]:
    """Shorten the names of runs for a legend: drop the words that all of them begin with.

    Raises:
        ValueError: there are no runs.
    """
    require_runs(runs)
    words = [run.name.split("-") for run in runs]
    # The last word of a name always stays.
    columns = list(zip(*(some[:-1] for some in words))) if len(runs) > 1 else []
    n_shared = next((place for place, column in enumerate(columns) if len(set(column)) > 1), len(columns))
    return {run.name: "-".join(some[n_shared:]) for run, some in zip(runs, words)}
