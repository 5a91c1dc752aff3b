"""Curves of losses and metrics over a run, for any number of runs side by side."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from recurra.analysis.plots.figure import COLOURS, GREY, LINE_STYLES, house_style, new_figure

PANELS: Mapping[str, Sequence[str]] = {
    "loss (nats per target)": ["train_loss", "valid_loss"],
    "validation perplexity": ["valid_perplexity"],
    "validation accuracy": ["valid_accuracy"],
}
"""What curves are usually drawn of; `measured_panels` leaves out what no run has."""

Rows: TypeAlias = Sequence[Mapping[str, Any]]
"""The rows of a metrics.csv, as `csv.DictReader` gives them: where nothing was measured a cell is empty."""

FEW_POINTS = 40
"""A curve of no more points than this shows each as a dot; a single point would be invisible otherwise."""


@house_style()
def metric_curves(
    runs: Mapping[str, Rows],
    panels: Mapping[str, Sequence[str]],
    *,
    x: str = "step",
    smoothing: int | float = 0,
    logarithmic: Collection[str] = (),
    marks: Mapping[str, Sequence[int | float]] | None = None,
) -> Figure:
    """Draw one panel per entry of `panels`, with a colour per run and a line style per column.

    A run that did not measure a column, or not yet, is left out there. Where a value of `x` comes twice the
    later row counts. What is not finite is not drawn.

    Args:
        runs: the rows of each run, by the name that the legend shows.
        panels: the columns of each panel, by the panel's title, for example
            {"Loss": ["train_loss", "valid_loss"], "Speed": ["tokens_per_second"]}.
        x: the column of the horizontal axis.
        smoothing: each point becomes the mean of the points at most half of this away, in units of x; what
            was measured stays visible behind. 0 smooths nothing. A curve whose points lie further apart,
            such as a validation loss, comes out as it is.
        logarithmic: the titles of the panels whose vertical axis is logarithmic.
        marks: for some of the runs the values of x at which they went on after an interruption: small ticks on the
            horizontal axis, in the run's colour.

    Raises:
        ValueError: no run, no panel, smoothing below 0, a column that no run has, a logarithmic panel or a marked run
            that is not there, or a cell that is no number.
    """
    if not runs or not panels:
        raise ValueError(f"runs and panels must not be empty, got {len(runs)} runs, {len(panels)} panels")
    if not smoothing >= 0:
        raise ValueError(f"smoothing must be 0 or more, got {smoothing}")
    if not set(logarithmic) <= set(panels):
        raise ValueError(f"logarithmic must name panels out of {list(panels)}, got {list(logarithmic)}")
    marked = {name: places for name, places in (marks or {}).items() if places}
    if not set(marked) <= set(runs):
        raise ValueError(f"marks must name runs out of {list(runs)}, got {list(marked)}")
    colours = dict(zip(runs, cycle(COLOURS)))
    figure = new_figure(3.6 * len(panels), 3.1)
    for axes, (title, columns) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        for column, line_style in zip(columns, cycle(LINE_STYLES)):
            for name, points in _points(runs, x, column).items():
                _draw(axes, points, float(smoothing), colours[name], line_style)
        for name, places in marked.items():
            _mark(axes, places, colours[name])
        axes.set(xlabel=_words(x), yscale="log" if title in logarithmic else "linear")
        axes.set_title(title)
        axes.grid(axis="y")
        if len(columns) > 1:
            styles = zip(columns, cycle(LINE_STYLES))
            axes.legend(handles=[_sample(_words(column), linestyle=style) for column, style in styles])
    names = [_sample(name, colour=colour) for name, colour in colours.items()]
    if marked:
        names.append(Line2D([], [], color=GREY, linestyle="none", marker="|", label="resumed"))
    figure.legend(handles=names, loc="outside lower center", ncols=min(len(names), 2 * len(panels)))
    return figure


def measured_panels(runs: Mapping[str, Rows]) -> dict[str, Sequence[str]]:
    """Those of `PANELS` of which some run has measured a column."""
    measured = {
        column for rows in runs.values() for row in rows for column, cell in row.items() if cell not in (None, "")
    }
    return {title: columns for title, columns in PANELS.items() if measured.intersection(columns)}


def smooth(points: Float[Tensor, "2 points"], width: float) -> Float[Tensor, "2 points"]:
    """The mean over the points at most width / 2 away, for each point; at the ends over those there are.

    Args:
        points: float64; row 0 the positions, increasing; row 1 the values, finite.
        width: of the window, in units of the positions.
    """
    positions, values = points
    first = torch.searchsorted(positions, positions - width / 2, side="left")
    last = torch.searchsorted(positions, positions + width / 2, side="right")
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    means = (sums[last] - sums[first]) / (last - first)
    # A point alone in its window keeps its value to the last bit; the difference of two sums may not.
    return torch.stack([positions, torch.where(last - first == 1, values, means)])


def _draw(axes: Axes, points: Float[Tensor, "2 points"], width: float, colour: str, line_style: str) -> None:
    smoothed = smooth(points, width)
    if not torch.equal(smoothed, points):
        axes.plot(*points.numpy(), color=colour, linestyle="-", linewidth=0.6, alpha=0.25, zorder=1)
    marker = "o" if points.shape[1] <= FEW_POINTS else ""
    axes.plot(*smoothed.numpy(), color=colour, linestyle=line_style, marker=marker)


def _mark(axes: Axes, places: Sequence[int | float], colour: str) -> None:
    """Ticks that stand on the horizontal axis."""
    axes.plot(
        places,
        [0.03] * len(places),
        transform=axes.get_xaxis_transform(),
        linestyle="none",
        marker="|",
        markersize=7,
        color=colour,
    )


def _sample(label: str, colour: str = GREY, linestyle: str = "-") -> Line2D:
    """A line that stands in a legend only."""
    return Line2D([], [], color=colour, linestyle=linestyle, label=label)


def _points(runs: Mapping[str, Rows], x: str, column: str) -> dict[str, Float[Tensor, "2 points"]]:
    """The finite points of every run that measured the column, in the order of x."""
    known = {key for rows in runs.values() for row in rows for key in row}
    for wanted in (x, column):
        if wanted not in known:
            raise ValueError(f"column {wanted!r} is in none of the runs; their columns: {sorted(known)}")
    points = {}
    for name, rows in runs.items():
        measured = [row for row in rows if all(row.get(key) not in (None, "") for key in (x, column))]
        values = {_number(name, row, x): _number(name, row, column) for row in measured}
        finite = sorted(pair for pair in values.items() if all(map(math.isfinite, pair)))
        if measured:
            points[name] = torch.tensor(finite, dtype=torch.float64).reshape(-1, 2).T.contiguous()
    return points


def _number(name: str, row: Mapping[str, Any], column: str) -> float:
    try:
        return float(row[column])
    except (TypeError, ValueError):
        raise ValueError(f"run {name!r}, column {column!r}: {row[column]!r} is not a number") from None


def _words(column: str) -> str:
    return column.replace("_", " ").replace("/", " ")
