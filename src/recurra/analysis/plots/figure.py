"""What all figures share: one style, a canvas of their own, and files that come out the same every time.

The figures are made of matplotlib's objects alone, without pyplot: no backend is chosen and no window
system is asked for, so that they can be drawn on a server, and beside whatever else a program draws.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cycler import cycler
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Told apart with every kind of colour blindness: the set of Okabe and Ito (Color Universal Design, 2008)
without its yellow, which is too light for a line on white."""
LINE_STYLES = ("-", "--", ":")
GREY = "#5A5A5A"
"""For what is not data: guide lines, marks, notes."""
DOTS_PER_INCH = 300

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same figure on every machine
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
    # Colours go round first and line styles after them, so that 21 lines differ.
    "axes.prop_cycle": cycler(linestyle=LINE_STYLES) * cycler(color=COLOURS),
    "svg.hashsalt": "recurra",  # else the names inside an SVG are random
    "savefig.dpi": DOTS_PER_INCH,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's defaults with `STYLE` on top, whatever was set before; what was set comes back after.

    Also a decorator. Matplotlib keeps its settings once per process: do not draw in two threads at a time.
    """
    with style.context(["default", STYLE]):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, its size in inches, that lays out its parts by itself."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@house_style()
def save(figure: Figure, folder: str | Path, name: str) -> list[Path]:
    """Write folder/name.png and folder/name.svg, and make the folder where it is missing.

    The same figure gives the same bytes: neither file holds a date, a version or a random name.

    Returns:
        The paths of the PNG and the SVG.

    Raises:
        ValueError: name is empty or has folders in it.
    """
    png = save_png(figure, folder, name)
    svg = png.with_name(f"{name}.svg")
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return [png, svg]


@house_style()
def save_png(figure: Figure, folder: str | Path, name: str) -> Path:
    """Write folder/name.png alone, as `save` does: for photographs, of which an SVG has nothing to add."""
    if not name or Path(name).name != name:
        raise ValueError(f"name must be a file's name without folders, got {name!r}; put folders into folder")
    path = Path(folder) / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path
