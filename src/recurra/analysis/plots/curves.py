"""Curves of losses and metrics of one or more runs."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from recurra.analysis.plots.figure import (
    COLOURS,
    GREY,
    LINE_STYLES,
    distinct_looks,
    house_style,
    label_ends,
    legend_below,
    new_figure,
)
from recurra.checks import require

_PANELS: Mapping[str, Sequence[str]] = {
    "loss (nats per target)": ["train_loss", "valid_loss"],
    "validation perplexity": ["valid_perplexity"],
    "validation accuracy": ["valid_accuracy"],
}
_Records: TypeAlias = Sequence[Mapping[str, Any]]
_FEW_POINTS = 40
"""Curves with at most this many points show each as a dot; otherwise a single point would be invisible."""


@house_style()
def metric_curves(
    runs: Mapping[str, _Records],
    panels: Mapping[str, Sequence[str]],
    *,
    x: str = "step",
    smoothing: int | float = 0,
    logarithmic: Collection[str] = (),
) -> Figure:
    """Draw one panel per entry of `panels`, with a colour per run and a line style per column.

    More runs than there are colours differ in colour and line style, and each has its name at the end of its curve.
    Then every column has a panel of its own, and panels stand below each other.

    A run without measurements of a column is omitted there. If a value of `x` occurs twice, the later record counts.
    Values that are not finite are not drawn.

    Args:
        runs: the records of each run, by its name in the legend.
        panels: the columns of each panel, by its title, for example
            {"Loss": ["train_loss", "valid_loss"], "Speed": ["tokens_per_second"]}.
        x: the column of the horizontal axis.
        smoothing: draw each point as the mean of the points at most half of this away, in units of x, and keep the
            measured curve visible behind. 0 does not smooth. Curves whose points are further apart, such as a
            validation loss, do not change.
        logarithmic: the titles of panels with a logarithmic vertical axis.

    Raises:
        ValueError: there is no run, or no run has a column.
    """
    require(len(runs) > 0, "runs", dict(runs), "at least one run")
    looks = dict(zip(runs, distinct_looks()))
    many = len(runs) > len(COLOURS)
    drawn = [_Panel(title, columns, title in logarithmic) for title, columns in panels.items()]
    drawn = [part for panel in drawn for part in panel.by_column()] if many else drawn
    height = max(3.1, 1.0 + 0.13 * len(runs)) if many else 3.1
    figure = new_figure(7.2, height * len(drawn)) if many else new_figure(3.6 * len(drawn), height)
    grid = figure.subplots(len(drawn), 1, squeeze=False) if many else figure.subplots(1, len(drawn), squeeze=False)
    for axes, panel in zip(grid.flat, drawn):
        curves = _draw_panel(axes, panel, runs, x, float(smoothing), looks, many)
        if many:
            label_ends(axes, curves, height - 0.8)
    if not many:
        names = [_sample(name, colour=colour) for name, (colour, _) in looks.items()]
        legend_below(figure, names, 2 * len(drawn))
    return figure


class _Panel(NamedTuple):
    title: str
    columns: Sequence[str]
    logarithmic: bool

    def by_column(self) -> list["_Panel"]:
        """Divide the panel into one for each of its columns: "train loss (nats per target)"."""
        if len(self.columns) == 1:
            return [self]
        unit = f" ({self.title.partition('(')[2]}" if "(" in self.title else ""
        return [_Panel(_words(column) + unit, [column], self.logarithmic) for column in self.columns]


def measured_panels(runs: Mapping[str, _Records]) -> dict[str, Sequence[str]]:
    """Return those of `PANELS` with a column that some run has measured."""
    cells = (cell for records in runs.values() for record in records for cell in record.items())
    measured = {column for column, value in cells if value not in (None, "")}
    return {title: columns for title, columns in _PANELS.items() if measured.intersection(columns)}


def _smooth(points: Float[Tensor, "2 points"], width: float) -> Float[Tensor, "2 points"]:
    """Replace each point by the mean over the points at most width / 2 away; positions are in row 0, and increase."""
    positions, values = points
    first = torch.searchsorted(positions, positions - width / 2, side="left")
    last = torch.searchsorted(positions, positions + width / 2, side="right")
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    means = (sums[last] - sums[first]) / (last - first)
    # A point without neighbours keeps its value to the last bit, which the difference of two sums may not.
    return torch.stack([positions, torch.where(last - first == 1, values, means)])


def _draw_panel(
    axes: Axes,
    panel: _Panel,
    runs: Mapping[str, _Records],
    x: str,
    width: float,
    looks: Mapping[str, tuple[str, str]],
    many: bool,
) -> dict[str, Line2D]:
    """Draw the columns of all runs; return each run's curve of the last column."""
    axes.set_yscale("log" if panel.logarithmic else "linear")
    curves: dict[str, Line2D] = {}
    for column, line_style in zip(panel.columns, cycle(LINE_STYLES)):
        for name, points in _points(runs, x, column).items():
            colour, own_style = looks[name]
            curves[name] = _draw(axes, points, width, colour, own_style if many else line_style)
    _label_panel(axes, panel.title, x, panel.columns)
    return curves


def _draw(axes: Axes, points: Float[Tensor, "2 points"], width: float, colour: str, line_style: str) -> Line2D:
    smoothed = _smooth(points, width)
    if not torch.equal(smoothed, points):
        axes.plot(*points.numpy(), color=colour, linestyle="-", linewidth=0.6, alpha=0.25, zorder=1)
    marker = "o" if points.shape[1] <= _FEW_POINTS else ""
    (line,) = axes.plot(*smoothed.numpy(), color=colour, linestyle=line_style, marker=marker)
    return line


def _label_panel(axes: Axes, title: str, x: str, columns: Sequence[str]) -> None:
    axes.set_xlabel(_words(x))
    axes.set_title(title)
    axes.grid(axis="y")
    if len(columns) > 1:
        styles = zip(columns, cycle(LINE_STYLES))
        axes.legend(handles=[_sample(_words(column), linestyle=style) for column, style in styles])


def _sample(label: str, colour: str = GREY, linestyle: str = "-") -> Line2D:
    return Line2D([], [], color=colour, linestyle=linestyle, label=label)


def _points(runs: Mapping[str, _Records], x: str, column: str) -> dict[str, Float[Tensor, "2 points"]]:
    """Return the finite points of each run that measured the column, in the order of x."""
    known = sorted({key for records in runs.values() for record in records for key in record})
    for wanted in (x, column):
        require(wanted in known, "a column", wanted, f"one that some run has: {', '.join(known)}")
    points = {}
    for name, records in runs.items():
        measured = [record for record in records if all(record.get(key) not in (None, "") for key in (x, column))]
        values = {float(record[x]): float(record[column]) for record in measured}
        finite = sorted(pair for pair in values.items() if all(map(math.isfinite, pair)))
        if measured:
            points[name] = torch.tensor(finite, dtype=torch.float64).reshape(-1, 2).T.contiguous()
    return points


def _words(column: str) -> str:
    return column.replace("_", " ").replace("/", " ")
