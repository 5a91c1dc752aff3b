"""Names beside the ends of curves, for figures with more curves than a legend can tell apart."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import ConnectionPatch

FONT_SIZE = 7
_LINE = 1.25 * FONT_SIZE
"""The height of a label in points."""


def label_ends(axes: Axes, curves: Mapping[str, Line2D], height: float) -> None:
    """Write the name of each curve to the right of the axes, level with its last point or as near as there is room.

    A thin line leads from the point to the name, in the curve's look: level up to the edge of the axes, and fainter, so
    that the names of curves that end early cross no others. A curve without points gets no name.

    Args:
        axes: with everything drawn, as the limits count.
        curves: lines in the axes, by name.
        height: of the axes, in inches.
    """
    axes.autoscale_view()  # otherwise the limits are set when the figure is drawn
    points = {name: np.asarray(curve.get_xydata()) for name, curve in curves.items()}
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = {name: tuple(found[-1].tolist()) for name, found in points.items() if len(found)}
    levels = [float(to_axes.transform(end)[1]) for end in ends.values()]
    places = spread(levels, _LINE / (72 * height))
    for (name, end), level, place in zip(ends.items(), levels, places):
        look = {"color": curves[name].get_color(), "linestyle": curves[name].get_linestyle()}
        edge = (1.0, level)
        axes.add_artist(ConnectionPatch(end, edge, "data", "axes fraction", linewidth=0.5, alpha=0.5, **look))
        axes.annotate(
            name,
            edge,
            xycoords="axes fraction",
            xytext=(1.05, place),
            textcoords="axes fraction",
            verticalalignment="center",
            fontsize=FONT_SIZE,
            color=look["color"],
            arrowprops={"arrowstyle": "-", "linewidth": 0.8, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 0, **look},
            annotation_clip=False,
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move places apart, each as little as the squares of all moves allow, until neighbours are `gap` apart.

    The order stays. Places stay in [0, 1], or begin at 0 if there is no room for all.
    """
    order = np.argsort(places, kind="stable")
    steps = gap * np.arange(len(places))
    # Without the gaps, places may touch but not cross: neighbours that would cross share their mean.
    groups: list[tuple[float, int]] = []
    for place in np.asarray(places, dtype=float)[order] - steps:
        mean, size = float(place), 1
        while groups and groups[-1][0] > mean:
            before, others = groups.pop()
            mean, size = (mean * size + before * others) / (size + others), size + others
        groups.append((mean, size))
    touching = np.repeat([mean for mean, _ in groups], [size for _, size in groups])
    found = np.empty(len(places))
    found[order] = touching.clip(0.0, max(0.0, 1.0 - steps.max(initial=0.0))) + steps
    return found.tolist()
