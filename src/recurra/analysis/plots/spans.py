"""GateLoop Figure 7: accuracy by the memory span that a prediction needs."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import conv1d

from recurra.analysis.plots.figure import GREY, house_style, legend_below, new_figure
from recurra.checks import require
from recurra.evaluation.accuracy import SpanAccuracy

FEW_POSITIONS = 20
"""An accuracy over fewer positions is not drawn at the end of a curve."""


@house_style()
def accuracy_over_span(runs: Mapping[str, SpanAccuracy], *, smoothing: int = 1, chance: float | None = None) -> Figure:
    """Draw the accuracy of one or more runs over the memory span, and the number of positions behind it.

    A curve ends with the last span at which it rests on at least `FEW_POSITIONS` positions: beyond, it is noise.

    Args:
        runs: the counts of `recurra.evaluation.accuracy.accuracy_by_span`, by their names in the legend.
        smoothing: an odd number of neighbouring bins whose positions are pooled for each point; 1 pools none.
        chance: an accuracy to mark, such as 1 / modulus for guessing; None marks nothing.

    Raises:
        ValueError: there is no run, or `smoothing` is not an odd number above 0.
    """
    require(len(runs) > 0, "runs", dict(runs), "at least one run")
    figure = new_figure(5.4, 3.6 + 0.09 * len(runs))  # with room for the legend, in two columns
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    for name, run in runs.items():
        middles = (run.edges[:-1] + run.edges[1:] - 1) / 2
        n_correct, counts = _pooled(run, smoothing)
        end = int((counts >= FEW_POSITIONS).nonzero().max()) + 1 if (counts >= FEW_POSITIONS).any() else 0
        label = f"{name} (overall {run.overall:.2f})"
        upper.plot(middles[:end], (n_correct / counts)[:end], label=label)
        # As `stairs`, which needs most of the figure's time to find the limits of a thousand steps.
        heights = [*run.counts.tolist(), *run.counts[-1:].tolist()]
        lower.fill_between(run.edges.numpy() - 0.5, heights, step="post", color=GREY, alpha=0.5, linewidth=0)
    if chance is not None:
        upper.axhline(chance, color=GREY, linewidth=0.9, linestyle=":", label=f"chance ({chance:.2f})")
    upper.set(ylabel="accuracy" if smoothing == 1 else f"accuracy ({smoothing} bins pooled)", ylim=(-0.02, 1.02))
    upper.grid(axis="y")
    legend_below(figure, upper.lines, 2)
    lower.set(xlabel="memory span (tokens)", ylabel="positions", yscale="log")
    upper.margins(x=0.01)
    figure.align_ylabels([upper, lower])
    return figure


def pooled_accuracies(run: SpanAccuracy, smoothing: int) -> Float[Tensor, " bins"]:
    """Return the accuracy over each bin and its neighbours, `smoothing` bins in all and fewer at both ends.

    Positions are pooled instead of averaging accuracies, so that bins with few positions have little weight. The result
    is NaN where there are no positions.

    Raises:
        ValueError: `smoothing` is not an odd number above 0.
    """
    n_correct, counts = _pooled(run, smoothing)
    return n_correct / counts


def _pooled(run: SpanAccuracy, smoothing: int) -> tuple[Float[Tensor, " bins"], Float[Tensor, " bins"]]:
    """Count the correct positions and all positions of each bin and its neighbours."""
    is_odd = smoothing >= 1 and smoothing % 2 == 1
    require(is_odd, "smoothing", smoothing, "an odd number of bins, at least 1")
    kernel = torch.ones(1, 1, smoothing, dtype=torch.float64)
    numbers = torch.stack([run.n_correct, run.counts]).double().unsqueeze(1)
    n_correct, counts = conv1d(numbers, kernel, padding=smoothing // 2).squeeze(1)
    return n_correct, counts
