"""Scores of runs: confusions, accuracy by memory span (GateLoop Figure 7), perplexity over FLOPs, contact sheets."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import conv1d

from recurra.analysis.plots.figure import (
    COLOURS,
    GREY,
    LINE_STYLES,
    distinct_looks,
    house_style,
    legend_below,
    new_figure,
)
from recurra.checks import require
from recurra.data.memory_horizon import SpanAccuracy

_FEW_CLASSES = 12
"""Up to this many classes, each cell shows its share in per cent."""
_COLOURS = "Blues"
_EMPTY = "#EEEEEE"
_DARK = 0.55
"""Cells with a larger share have white numbers."""


@house_style()
def confusion_matrix(confusion: Int[Tensor, "C C"], names: Sequence[str]) -> Figure:
    """Draw the predictions (columns) for the examples of each class (row), as shares of the row.

    The number of examples of each class is to the right of its row. A class without examples has a grey row.

    Args:
        confusion: the number of examples of class i that were predicted as class j.
        names: the names of the classes.
    """
    n_classes = len(confusion)
    require(len(names) == n_classes, "names", list(names), f"one name for each of {n_classes} classes")
    counts = confusion.sum(1).numpy()
    shares = np.ma.masked_array(confusion.numpy() / counts.clip(1)[:, None])
    shares[counts == 0] = np.ma.masked
    edge = max(2.2, (0.36 if n_classes <= _FEW_CLASSES else 0.2) * n_classes)
    margin = 0.3 + 0.065 * max(map(len, names))
    figure = new_figure(edge + margin + 1.7, edge + margin)
    axes = figure.subplots()
    axes.set_facecolor(_EMPTY)
    image = axes.imshow(shares, cmap=_COLOURS, vmin=0, vmax=1, interpolation="none")
    places = range(n_classes)
    size = 8 if n_classes <= _FEW_CLASSES else 6
    axes.set_xticks(places, names, rotation=90, fontsize=size)
    axes.set_yticks(places, names, fontsize=size)
    axes.set(xlabel="predicted", ylabel="true")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for row in places:
        axes.text(n_classes - 0.3, row, f"{counts[row]:,}", fontsize=size - 1, color=GREY, va="center")
    if n_classes <= _FEW_CLASSES:
        for (row, column), share in np.ma.ndenumerate(shares):
            if share > 0:
                colour = "white" if share > _DARK else "black"
                axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 2.5 / edge), pad=0.02 + 0.35 / edge, label="share of the row")
    bar.outline.set_visible(False)
    return figure


_FEW_POSITIONS = 20
"""An accuracy over fewer positions is not drawn at the end of a curve."""


@house_style()
def accuracy_over_span(runs: Mapping[str, SpanAccuracy], *, smoothing: int = 1, chance: float | None = None) -> Figure:
    """Draw the accuracy of one or more runs over the memory span, and the number of positions behind it.

    A curve ends where it rests on too few positions.

    Args:
        runs: counts of right answers, by their names in the legend.
        smoothing: number of neighbouring spans that are pooled for each point, an odd number; 1 for no smoothing.
        chance: an accuracy to mark, such as 1 / modulus for guessing.
    """
    require(len(runs) > 0, "runs", dict(runs), "at least one run")
    figure = new_figure(5.4, 3.6 + 0.09 * len(runs))  # with room for the legend, in two columns
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    for name, run in runs.items():
        n_correct, counts = _pooled(run, smoothing)
        end = int((counts >= _FEW_POSITIONS).nonzero().max()) + 1 if (counts >= _FEW_POSITIONS).any() else 0
        label = f"{name} (overall {run.overall:.2f})"
        upper.plot(range(end), (n_correct / counts)[:end], label=label)
        # As `stairs`, which needs most of the figure's time to find the limits of a thousand steps.
        heights = [*run.counts.tolist(), *run.counts[-1:].tolist()]
        lower.fill_between(np.arange(len(heights)) - 0.5, heights, step="post", color=GREY, alpha=0.5, linewidth=0)
    if chance is not None:
        upper.axhline(chance, color=GREY, linewidth=0.9, linestyle=":", label=f"chance ({chance:.2f})")
    upper.set(ylabel="accuracy" if smoothing == 1 else f"accuracy ({smoothing} spans pooled)", ylim=(-0.02, 1.02))
    upper.grid(axis="y")
    legend_below(figure, upper.lines, 2)
    lower.set(xlabel="memory span (tokens)", ylabel="positions", yscale="log")
    upper.margins(x=0.01)
    figure.align_ylabels([upper, lower])
    return figure


def _pooled(run: SpanAccuracy, smoothing: int) -> tuple[Float[Tensor, " spans"], Float[Tensor, " spans"]]:
    """Pool the counts of each span with its neighbours', so that spans with few positions weigh little."""
    is_odd = smoothing >= 1 and smoothing % 2 == 1
    require(is_odd, "smoothing", smoothing, "an odd number of spans, at least 1")
    kernel = torch.ones(1, 1, smoothing, dtype=torch.float64)
    numbers = torch.stack([run.n_correct, run.counts]).double().unsqueeze(1)
    n_correct, counts = conv1d(numbers, kernel, padding=smoothing // 2).squeeze(1)
    return n_correct, counts


_CORNERS = (("left", "bottom"), ("right", "top"), ("right", "bottom"), ("left", "top"))
"""The corner of a label that touches its point. It differs by curve, because points of two curves often coincide."""


class CostPoint(NamedTuple):
    """Tokens per segment of a model, FLOPs of one forward over a segment, and perplexity on the test split."""

    segment_length: int
    flops: int
    perplexity: float


@house_style()
def perplexity_over_flops(curves: Mapping[str, Sequence[CostPoint]]) -> Figure:
    """Draw test perplexity over FLOPs, with one curve per kind of model.

    The paper's text gives the FLOPs of one forward over a segment. Panel a shows these, with points labelled by their
    segment length n; there a model gets cheaper by reading less. Panel b divides the FLOPs by n, which is the cost of
    reading a text. A point has the same height in both panels.

    """
    figure = new_figure(7.2, 3.5)
    by_segment, by_token = figure.subplots(1, 2, sharey=True)
    for (name, points), (colour, style), corner in zip(curves.items(), distinct_looks(), cycle(_CORNERS)):
        ordered = sorted(points)
        perplexities = [point.perplexity for point in ordered]
        a_segment = [point.flops / 1e9 for point in ordered]
        a_token = [point.flops / point.segment_length / 1e6 for point in ordered]
        for axes, costs in ((by_segment, a_segment), (by_token, a_token)):
            axes.plot(costs, perplexities, label=name, color=colour, linestyle=style, marker="o")
        for point, cost in zip(ordered, a_segment):
            _mark(by_segment, str(point.segment_length), (cost, point.perplexity), corner, colour)
    by_segment.set(xlabel="GFLOPs of a segment's forward, without softmax", ylabel="test perplexity")
    by_segment.set_title("a  Per segment, marked with its tokens n")
    by_token.set(xlabel="MFLOPs per token, without softmax")
    by_token.set_title("b  Per token")
    for axes in (by_segment, by_token):
        axes.grid()
        axes.margins(y=0.1)
        # From 0, so that savings show as shares of the whole.
        axes.set_xlim(0, 1.08 * max(cost for line in axes.lines for cost in line.get_xdata()))
    legend_below(figure, by_segment.lines, 4)
    return figure


def _mark(axes: Axes, text: str, point: tuple[float, float], corner: tuple[str, str], colour: str) -> None:
    horizontal, vertical = corner
    axes.annotate(
        text,
        point,
        xytext=(4 if horizontal == "left" else -4, 2 if vertical == "bottom" else -2),
        textcoords="offset points",
        horizontalalignment=horizontal,
        verticalalignment=vertical,
        fontsize=7,
        color=colour,
    )


_FRAMES_PER_ROW = 8
"""Frames per row."""
_MOST_CLASSES = 6
"""Maximum number of classes with a line."""
_WIDTH = 9.0
"""Width of the figure in inches."""
_FEW_SEGMENTS = 60
"""Up to this many segments, each has a marker at its end."""


@house_style()
def contact_sheet(
    frames: UInt8[Tensor, "N H W 3"],
    frame_times: Sequence[float],
    ends: Sequence[float],
    probabilities: Float[Tensor, "S C"],
    names: Sequence[str],
) -> Figure:
    """Draw frames with their times in rows, and below them the probabilities of the likeliest classes over time.

    The lines show the classes with the highest probability at any time.

    Args:
        frames: some or all of the frames that the model read; RGB.
        frame_times: the time of each frame, in seconds.
        ends: the end of each segment, in seconds.
        probabilities: of each class after each segment.
        names: the names of the classes.
    """
    n_rows = math.ceil(len(frames) / _FRAMES_PER_ROW)
    row_height = _WIDTH / _FRAMES_PER_ROW * frames.shape[1] / frames.shape[2] + 0.22
    figure = new_figure(_WIDTH, n_rows * row_height + 2.6)
    sheet, chart = figure.subfigures(2, 1, squeeze=False, height_ratios=[n_rows * row_height, 2.6])[:, 0]
    for place, axes in enumerate(sheet.subplots(n_rows, _FRAMES_PER_ROW, squeeze=False).flat):
        axes.axis("off")
        if place < len(frames):
            axes.imshow(frames[place].numpy())
            axes.set_title(_clock(frame_times[place]), fontsize=7, color=GREY, pad=2)
    axes = chart.subplots()
    marker = "o" if len(ends) <= _FEW_SEGMENTS else ""
    colours, styles = cycle(COLOURS), cycle(LINE_STYLES)
    for index in _shown_classes(probabilities, _MOST_CLASSES):
        # not clipped, for the last point lies on the edge
        line = {"color": next(colours), "linestyle": next(styles), "marker": marker, "clip_on": False}
        axes.plot(ends, probabilities[:, index].numpy(), label=names[index], **line)
    axes.set(xlabel="seconds (end of the segment)", ylabel="probability", ylim=(-0.02, 1.02))
    axes.set_xlim(0, max(ends[-1], frame_times[-1]))
    axes.grid(axis="y")
    chart.legend(loc="outside right center")
    return figure


def _shown_classes(probabilities: Float[Tensor, "S C"], n: int) -> list[int]:
    """Return the n classes with the highest probability at any time, in falling order."""
    highest = probabilities.amax(0)
    return torch.argsort(highest, descending=True, stable=True)[:n].tolist()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{rest:.1f} s" if not minutes else f"{int(minutes)}:{rest:04.1f}"
