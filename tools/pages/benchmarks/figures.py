"""Figures of the benchmarks page: time and peak memory over the length of a sequence."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from recurra.analysis.plots.figure import COLOURS, GREY, house_style, new_figure
from recurra.checks import sentence
from tools.pages.figures import Figures

RESOLVED_MEGABYTES = 0.1
"""Below this the kernel's count means nothing, and points are not drawn."""
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_LINES = ("-", "--")


class SweepFigures(Figures):
    """What sections may draw of a record.

    Args:
        record: what was measured.
        folder: as in `Figures`.
    """

    def __init__(self, record: Mapping[str, Any], folder: Path | None) -> None:
        super().__init__(folder)
        self.record = record

    def sweep(self, key: str) -> str:
        """Draw a sweep: time and memory of all methods over L."""
        sweep = self.record["sweeps"][key]
        figure = over_length(sweep, self.record["limits"])
        return self.show(figure, f"benchmarks-{key}", f"{sweep['title']}: time and memory over L")


@house_style()
def over_length(sweep: Mapping[str, Any], limits: Mapping[str, float]) -> Figure:
    """Draw a sweep of a record: seconds of a call, and MB above its inputs, both over L on logarithmic axes.

    Methods differ in colour and marker, and in line style once the colours repeat; the floor is black and dotted. Bars
    are quartiles. Grey lines are the limits beyond which nothing was measured.

    Raises:
        ValueError: the sweep has no points.
    """
    if not any(sweep["times"].values()) and not any(sweep["memory"].values()):
        raise ValueError(sentence("sweep", f"{sweep['title']!r}, which has no points", "one that was measured"))
    figure = new_figure(9.6, 3.9)
    time, memory = figure.subplots(1, 2)
    for way, look in looks(sweep).items():
        points = _times(sweep, way)
        if points:
            lengths, medians = list(points), [point["median"] for point in points.values()]
            below = [max(point["median"] - point["low"], 0.0) for point in points.values()]
            above = [max(point["high"] - point["median"], 0.0) for point in points.values()]
            time.errorbar(lengths, medians, [below, above], label=way, elinewidth=0.8, **look)
        megabytes = {int(length): value for length, value in sweep["memory"].get(way, {}).items()}
        seen = {length: value for length, value in megabytes.items() if value >= RESOLVED_MEGABYTES}
        if seen:
            memory.plot(list(seen), list(seen.values()), label=way, **look)
    _limit(time, limits["seconds"], f"{limits['seconds']:g} s")
    _limit(memory, 1024 * limits["gigabytes"], f"{limits['gigabytes']:g} GB with the inputs")
    time.set(ylabel="seconds of a call")
    memory.set(ylabel="peak MB above the inputs")
    time.set_title(f"a  Time, {sweep['shape']}")
    memory.set_title("b  Memory")
    _axes(sweep, time, memory)
    handles, names = time.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper")
    return figure


def looks(sweep: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Choose colour, marker and line style of each method."""
    colours = [colour for colour in COLOURS if colour != "#000000"]
    dashes = [line for line in _LINES for _ in colours]
    others = [way for way in sweep["ways"] if way != sweep["floor"]]
    found = {
        way: {"color": colour, "linestyle": line, "marker": marker}
        for way, colour, line, marker in zip(others, cycle(colours), cycle(dashes), cycle(_MARKERS))
    }
    return {sweep["floor"]: {"color": "#000000", "linestyle": ":", "marker": ""}} | found


def _times(sweep: Mapping[str, Any], way: str) -> dict[int, Mapping[str, float]]:
    return {int(length): points[way] for length, points in sweep["times"].items() if way in points}


def _limit(axes: Axes, height: float, text: str) -> None:
    axes.axhline(height, color=GREY, linewidth=0.8)
    place = axes.get_yaxis_transform()
    axes.text(0.01, height, text, transform=place, color=GREY, fontsize=7, horizontalalignment="left", va="bottom")


def _axes(sweep: Mapping[str, Any], *panels: Axes) -> None:
    measured = [int(length) for length, points in sweep["times"].items() if points]
    measured += [int(length) for points in sweep["memory"].values() for length in points]
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(min(measured) / 1.2, max(measured) * 1.2)  # both panels alike
        axes.set_xlabel("L, steps of the sequence")
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=16))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"$2^{{{round(length).bit_length() - 1}}}$"))
        axes.grid()
