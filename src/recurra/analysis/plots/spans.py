"""Figure 7 of GateLoop: accuracy over the memory span that a prediction needs."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import conv1d

from recurra.analysis.plots.figure import GREY, house_style, new_figure
from recurra.evaluation.accuracy import SpanAccuracy


@house_style()
def accuracy_over_span(runs: Mapping[str, SpanAccuracy], *, smoothing: int = 1, chance: float | None = None) -> Figure:
    """Draw the accuracy of any number of runs over the memory span, and how many positions it rests on.

    Args:
        runs: by the name that the legend shows, what `recurra.evaluation.accuracy.accuracy_by_span` counted.
        smoothing: an odd number of neighbouring bins whose positions are pooled for each point; 1 pools none.
        chance: an accuracy to mark, such as 1 / modulus for a guess; None marks nothing.

    Raises:
        ValueError: there is no run, or smoothing is not odd and positive.
    """
    if not runs:
        raise ValueError("runs must hold at least one run, got none")
    figure = new_figure(5.4, 3.8)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    for name, run in runs.items():
        middles = (run.edges[:-1] + run.edges[1:] - 1) / 2
        upper.plot(middles, pooled_accuracies(run, smoothing), label=f"{name} (overall {run.overall:.2f})")
        lower.stairs(run.counts.numpy(), run.edges.numpy() - 0.5, color=GREY, fill=True, alpha=0.5)
    if chance is not None:
        upper.axhline(chance, color=GREY, linewidth=0.9, linestyle=":", label=f"chance ({chance:.2f})")
    upper.set(ylabel="accuracy" if smoothing == 1 else f"accuracy ({smoothing} bins pooled)", ylim=(0, 1.02))
    upper.grid(axis="y")
    upper.legend()
    lower.set(xlabel="memory span (tokens)", ylabel="positions", yscale="log")
    upper.margins(x=0.01)
    figure.align_ylabels([upper, lower])
    return figure


def pooled_accuracies(run: SpanAccuracy, window: int) -> Float[Tensor, " bins"]:
    """The accuracy over each bin and its neighbours: right positions in the window by all positions in it.

    Positions are pooled rather than accuracies averaged, so that a bin with few of them weighs little. The
    window is cut at both ends. NaN where it holds no position.

    Raises:
        ValueError: window is not odd and positive.
    """
    if window < 1 or window % 2 == 0:
        raise ValueError(f"smoothing must be an odd number of bins, 1 or more, got {window}")
    kernel = torch.ones(1, 1, window, dtype=torch.float64)
    numbers = torch.stack([run.n_correct, run.counts]).double().unsqueeze(1)
    n_correct, counts = conv1d(numbers, kernel, padding=window // 2).squeeze(1)
    return n_correct / counts
