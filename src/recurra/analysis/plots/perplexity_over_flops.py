"""Figures 5 and 6 of the Compact Recurrent Transformer: perplexity against cost, for several segment lengths."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recurra.analysis.plots.figure import distinct_looks, house_style, legend_below, new_figure
from recurra.checks import require

CORNERS = (("left", "bottom"), ("right", "top"), ("right", "bottom"), ("left", "top"))
"""The corner of a label that touches its point. It differs by curve, because points of two curves often coincide."""


class CostPoint(NamedTuple):
    """The cost and the perplexity of a model.

    segment_length: tokens per segment.
    flops: of one forward over a segment.
    perplexity: on the test split.
    """

    segment_length: int
    flops: int
    perplexity: float


@house_style()
def perplexity_over_flops(curves: Mapping[str, Sequence[CostPoint]]) -> Figure:
    """Draw test perplexity over FLOPs, with one curve per kind of model.

    The paper's text gives the FLOPs of one forward over a segment. Panel a shows these, with points labelled by their
    segment length n; there a model gets cheaper by reading less. Panel b divides the FLOPs by n, which is the cost of
    reading a text. A point has the same height in both panels.

    Args:
        curves: the points of each kind of model, in any order, by its name in the legend.

    Raises:
        ValueError: there is no curve, a curve has no points, or a number is not finite and above 0.
    """
    _check(curves)
    figure = new_figure(7.2, 3.5)
    by_segment, by_token = figure.subplots(1, 2, sharey=True)
    for (name, points), (colour, style), corner in zip(curves.items(), distinct_looks(), cycle(CORNERS)):
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


def _check(curves: Mapping[str, Sequence[CostPoint]]) -> None:
    require(len(curves) > 0, "curves", dict(curves), "at least one curve")
    for name, points in curves.items():
        require(len(points) > 0, f"curves[{name!r}]", list(points), "at least one point")
        for point in points:
            fits = all(0 < number < math.inf for number in point)
            require(fits, f"a point of curves[{name!r}]", tuple(point), "finite numbers above 0")


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
