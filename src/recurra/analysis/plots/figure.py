"""Shared parts of all figures: one style, reproducible files, and no pyplot, which would choose a backend."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, cast

from cycler import cycler
from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from recurra._files.writing import replacing
from recurra.checks import require

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that people with any kind of colour blindness can tell apart: the set of Okabe and Ito (Color Universal
Design, 2008) without its yellow, which is too light for lines on white."""
LINE_STYLES = ("-", "--", ":")
GREY = "#5A5A5A"
"""The colour of everything but data: guide lines, marks, notes."""

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # part of matplotlib, so figures are the same on every machine
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.6,
    # Colours change before line styles, so that 21 lines differ.
    "axes.prop_cycle": cycler(linestyle=LINE_STYLES) * cycler(color=COLOURS),
    "svg.hashsalt": "recurra",  # otherwise the names inside an SVG are random
    "savefig.dpi": 300,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Use matplotlib's defaults with our style on top; its settings are global, so do not draw in two threads."""
    with style.context(["default", _STYLE]):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure of a size in inches, with automatic layout."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def distinct_looks() -> Iterator[tuple[str, str]]:
    """Yield pairs of a colour and a line style: the first 21 differ, and colours change before line styles."""
    return cycle([(colour, line_style) for line_style in LINE_STYLES for colour in COLOURS])


def legend_below(figure: Figure, handles: Sequence[Artist], most_columns: int) -> Legend:
    """Add a legend below a figure, in as many columns as fit; a figure narrower than one column gets wider."""
    renderer = cast(Any, figure.canvas).get_renderer()
    columns = max(1, min(len(handles), most_columns))
    while True:
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        width = legend.get_window_extent(renderer).width
        if columns == 1 or width <= figure.bbox.width:
            figure.set_figwidth(max(figure.get_figwidth(), width / figure.dpi))
            return legend
        legend.remove()
        columns -= 1


@house_style()
def save(figure: Figure, folder: str | Path, name: str) -> list[Path]:
    """Write folder/name.png and folder/name.svg, without date, version or random name, and return their paths.

    Raises:
        ValueError: `name` is empty or contains folders.
    """
    png = save_png(figure, folder, name)
    svg = png.with_name(f"{name}.svg")
    with replacing(svg) as file, _laid_out(figure):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return [png, svg]


@contextmanager
def _laid_out(figure: Figure) -> Iterator[None]:
    """Keep a figure's present layout: both files have the same, and finding it takes a third of the time."""
    engine = figure.get_layout_engine()
    figure.set_layout_engine("none")
    try:
        yield
    finally:
        figure.set_layout_engine(engine)


@house_style()
def save_png(figure: Figure, folder: str | Path, name: str, *, dots_per_inch: int | None = None) -> Path:
    """Write only folder/name.png, as `save` does: for photographs, where an SVG adds nothing."""
    is_plain = bool(name) and Path(name).name == name
    require(is_plain, "name", name, "a file name without folders", "put folders into `folder`")
    path = Path(folder) / f"{name}.png"
    with replacing(path) as file:
        figure.savefig(file, format="png", metadata={"Software": None}, dpi=dots_per_inch or _STYLE["savefig.dpi"])
    return path
