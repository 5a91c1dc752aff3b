"""Figures 5 and 6 of the Compact Recurrent Transformer: what a perplexity costs, for segments of several lengths."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recurra.analysis.plots.figure import COLOURS, LINE_STYLES, house_style, new_figure

CORNERS = (("left", "bottom"), ("right", "top"), ("right", "bottom"), ("left", "top"))
"""Where a mark stands beside its point, by curve, as the mark's own sides: points of two curves often coincide."""


class CostPoint(NamedTuple):
    """A model at work.

    segment_length: tokens of a segment.
    flops: of one forward of a segment.
    perplexity: on the test split.
    """

    segment_length: int
    flops: int
    perplexity: float


@house_style()
def perplexity_over_flops(curves: Mapping[str, Sequence[CostPoint]]) -> Figure:
    """Draw test perplexity over FLOPs, a curve for each kind of model.

    The paper's text speaks of the FLOPs of one forward of a segment: that is panel a, its points marked with their
    segment length n. There a model gets cheaper by reading less. In panel b the FLOPs are divided by n: what it costs
    to read a text. A point has the same height in both.

    Args:
        curves: the points of each kind of model, in any order, by the name that the legend shows.

    Raises:
        ValueError: there is no curve, a curve has no point, or a number is not positive and finite.
    """
    _check(curves)
    figure = new_figure(7.2, 3.5)
    by_segment, by_token = figure.subplots(1, 2, sharey=True)
    styles = [style for style in LINE_STYLES for _ in COLOURS]  # colours first, so that 21 curves differ
    looks = zip(cycle(styles), cycle(COLOURS), cycle(CORNERS))
    for (name, points), (style, colour, corner) in zip(curves.items(), looks):
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
        # From 0: what a model saves is a share of the whole.
        axes.set_xlim(0, 1.08 * max(cost for line in axes.lines for cost in line.get_xdata()))
    handles, names = by_segment.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 4))
    return figure


def _check(curves: Mapping[str, Sequence[CostPoint]]) -> None:
    if not curves:
        raise ValueError("curves must hold at least one curve, got none")
    for name, points in curves.items():
        if not points:
            raise ValueError(f"curve {name!r} must have at least one point, got none")
        for point in points:
            if not all(0 < number < math.inf for number in point):
                raise ValueError(f"curve {name!r}: numbers must be positive and finite, got {tuple(point)}")


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
