"""Gradients between the segments of a Compact Recurrent Transformer by distance, with the bounds of CRT (2)."""

from collections.abc import Mapping
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from recurra.analysis.gradient_flow import GradientFlow
from recurra.analysis.plots.figure import COLOURS, GREY, LINE_STYLES, house_style, legend_below, new_figure
from recurra.checks import sentence

_TOTAL, _DIRECT, _BOUND = LINE_STYLES
_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "measured, all paths": {"linestyle": _TOTAL},
    "measured, along the RNN": {"linestyle": _DIRECT},
    "bound from measured steps": {"linestyle": _BOUND, "linewidth": 1.0},
    "bound, CRT (2)": {"linestyle": _BOUND, "linewidth": 2.4},
}


@house_style()
def gradient_over_distance(runs: Mapping[str, GradientFlow]) -> Figure:
    """Draw ||dy_k/dy_i|| of one or more runs over k - i, with a colour per run and a column per target k.

    Above: the measured norms, along all paths and along the memory RNN alone. Below: the same norms with their bounds,
    on a wider scale; "CRT (2)" is the bound with each step's own alpha and beta. Vertical lines are the borders of
    segments, in grey if all runs share them.

    Raises:
        ValueError: there is no run, or the runs have different numbers of targets.
    """
    n_targets = {len(run.targets) for run in runs.values()}
    if len(n_targets) != 1:
        got = f"{len(runs)} runs with {sorted(n_targets)} targets"
        raise ValueError(sentence("runs", got, "at least one run, all with the same number of targets"))
    (columns,) = n_targets
    figure = new_figure(max(5.4, 3.6 * columns), 5.6)
    grid = figure.subplots(2, columns, sharex="col", sharey="row", squeeze=False)
    for column, (upper, lower) in enumerate(zip(*grid)):
        for run, colour in zip(runs.values(), cycle(COLOURS)):
            _draw(upper, lower, run, column, colour)
        _mark_borders((upper, lower), runs, column)
        upper.set(yscale="log")
        outputs = [(int(run.targets[column]) - len(run.sources) + 1, run.segment_length) for run in runs.values()]
        upper.set_title("\n".join(dict.fromkeys(f"to output {number} of {n}" for number, n in outputs)))
        lower.set(xlabel="distance $k - i$ (tokens)")
        lower.yaxis.set_major_locator(MaxNLocator(integer=True))
        lower.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"$10^{{{value:.0f}}}$"))
        for axes in (upper, lower):
            axes.grid(axis="y")
            axes.margins(x=0.02)
    grid[0, 0].set(ylabel=r"$\|\partial y_k / \partial y_i\|_2$")
    grid[1, 0].set(ylabel=r"$\|\partial y_k / \partial y_i\|_2$ and its bounds")
    figure.align_ylabels(grid[:, 0])
    samples = [Line2D([], [], color=colour, label=name) for name, colour in zip(runs, cycle(COLOURS))]
    samples += [Line2D([], [], color=GREY, label=label, **look) for label, look in _LOOKS.items()]
    legend_below(figure, samples, 2 if columns == 1 else 3)
    return figure


def _draw(upper: Axes, lower: Axes, run: GradientFlow, column: int, colour: str) -> None:
    distances = run.distances[column].numpy()
    total, direct = run.total[column], run.direct[column]
    for values, style in ((total, _TOTAL), (direct, _DIRECT)):
        upper.plot(distances, values.numpy(), color=colour, linestyle=style)
    logarithms = (total.log10(), direct.log10(), run.log10_bound_measured[column], run.log10_bound[column])
    for values, look in zip(logarithms, _LOOKS.values()):
        lower.plot(distances, values.numpy(), color=colour, **look)


def _borders(run: GradientFlow, column: int) -> list[float]:
    """Return the distances at which the sources' segments begin, half a token beyond the first token."""
    n = run.segment_length
    return [int(run.targets[column]) - first + 0.5 for first in range(n, len(run.sources) + 1, n)]


def _mark_borders(panels: tuple[Axes, Axes], runs: Mapping[str, GradientFlow], column: int) -> None:
    borders = [_borders(run, column) for run in runs.values()]
    shared = all(of_run == borders[0] for of_run in borders)
    for of_run, colour in zip(borders, cycle(COLOURS)):
        for border in of_run:
            for axes in panels:
                axes.axvline(border, color=GREY if shared else colour, linewidth=0.8, alpha=0.6, zorder=0)
        if shared:
            break
