"""Curves of losses and metrics of one or more runs."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, TypeAlias

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
def metric_curves(runs: Mapping[str, _Records], panels: Mapping[str, Sequence[str]]) -> Figure:
    """Draw one panel per entry of `panels`, with a colour per run and a line style per column.

    More runs than there are colours differ in colour and line style; then every column has a panel of its own.

    A run without measurements of a column is omitted there. If a step occurs twice, the later record counts.
    Values that are not finite are not drawn.

    Args:
        runs: the records of each run, by its name in the legend.
        panels: the columns of each panel, by its title, for example
            {"Loss": ["train_loss", "valid_loss"], "Speed": ["tokens_per_second"]}.

    Raises:
        ValueError: there is no run, or no run has a column.
    """
    require(len(runs) > 0, "runs", dict(runs), "at least one run")
    looks = dict(zip(runs, distinct_looks()))
    many = len(runs) > len(COLOURS)
    drawn = [*panels.items()]
    if many:
        drawn = [part for title, columns in drawn for part in _by_column(title, columns)]
    figure = new_figure(3.6 * len(drawn), 3.1 + (0.09 * len(runs) if many else 0))
    for axes, (title, columns) in zip(figure.subplots(1, len(drawn), squeeze=False).flat, drawn):
        axes.set_title(title)
        _draw_panel(axes, columns, runs, looks, many)
    names = [_sample(name, colour, style if many else "-") for name, (colour, style) in looks.items()]
    legend_below(figure, names, 2 * len(drawn))
    return figure


def _by_column(title: str, columns: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
    """Divide a panel into one for each of its columns: "train loss (nats per target)"."""
    if len(columns) == 1:
        return [(title, columns)]
    unit = f" ({title.partition('(')[2]}" if "(" in title else ""
    return [(_words(column) + unit, [column]) for column in columns]


def measured_panels(runs: Mapping[str, _Records]) -> dict[str, Sequence[str]]:
    """Return those of `PANELS` with a column that some run has measured."""
    cells = (cell for records in runs.values() for record in records for cell in record.items())
    measured = {column for column, value in cells if value not in (None, "")}
    return {title: columns for title, columns in _PANELS.items() if measured.intersection(columns)}


def _draw_panel(
    axes: Axes,
    columns: Sequence[str],
    runs: Mapping[str, _Records],
    looks: Mapping[str, tuple[str, str]],
    many: bool,
) -> None:
    for column, line_style in zip(columns, cycle(LINE_STYLES)):
        for name, points in _points(runs, column).items():
            colour, own_style = looks[name]
            marker = "o" if points.shape[1] <= _FEW_POINTS else ""
            axes.plot(*points.numpy(), color=colour, linestyle=own_style if many else line_style, marker=marker)
    axes.set_xlabel("step")
    axes.grid(axis="y")
    if len(columns) > 1:
        styles = zip(columns, cycle(LINE_STYLES))
        axes.legend(handles=[_sample(_words(column), linestyle=style) for column, style in styles])


def _sample(label: str, colour: str = GREY, linestyle: str = "-") -> Line2D:
    return Line2D([], [], color=colour, linestyle=linestyle, label=label)


def _points(runs: Mapping[str, _Records], column: str) -> dict[str, Float[Tensor, "2 points"]]:
    """Return the finite points of each run that measured the column, in the order of steps."""
    known = sorted({key for records in runs.values() for record in records for key in record})
    require(column in known, "a column", column, f"one that some run has: {', '.join(known)}")
    points = {}
    for name, records in runs.items():
        measured = [record for record in records if all(record.get(key) not in (None, "") for key in ("step", column))]
        values = {float(record["step"]): float(record[column]) for record in measured}
        finite = sorted(pair for pair in values.items() if all(map(math.isfinite, pair)))
        if measured:
            points[name] = torch.tensor(finite, dtype=torch.float64).reshape(-1, 2).T.contiguous()
    return points


def _words(column: str) -> str:
    return column.replace("_", " ").replace("/", " ")
