"""The confusion matrix of a classifier."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from recurra.analysis.plots.figure import GREY, house_style, new_figure
from recurra.checks import require

FEW_CLASSES = 12
"""Up to this many classes, each cell shows its share in per cent."""
COLOURS = "Blues"
EMPTY = "#EEEEEE"
DARK = 0.55
"""Cells with a larger share have white numbers."""


@house_style()
def confusion_matrix(confusion: Int[Tensor, "C C"], names: Sequence[str]) -> Figure:
    """Draw the predictions (columns) for the examples of each class (row), as shares of the row.

    The number of examples of each class is to the right of its row. A class without examples has a grey row.

    Args:
        confusion: the number of examples of class i that were predicted as class j.
        names: the names of the classes.

    Raises:
        ValueError: there is not one name per class, or a count is negative.
    """
    n_classes = len(confusion)
    require(len(names) == n_classes, "names", list(names), f"one name for each of {n_classes} classes")
    smallest = int(confusion.min())
    require(smallest >= 0, "confusion.min()", smallest, "at least 0", "the matrix holds counts")
    counts = confusion.sum(1).numpy()
    shares = np.ma.masked_array(confusion.numpy() / counts.clip(1)[:, None])
    shares[counts == 0] = np.ma.masked
    edge = max(2.2, (0.36 if n_classes <= FEW_CLASSES else 0.2) * n_classes)
    margin = 0.3 + 0.065 * max(map(len, names))
    figure = new_figure(edge + margin + 1.7, edge + margin)
    axes = figure.subplots()
    axes.set_facecolor(EMPTY)
    image = axes.imshow(shares, cmap=COLOURS, vmin=0, vmax=1, interpolation="none")
    places = range(n_classes)
    size = 8 if n_classes <= FEW_CLASSES else 6
    axes.set_xticks(places, names, rotation=90, fontsize=size)
    axes.set_yticks(places, names, fontsize=size)
    axes.set(xlabel="predicted", ylabel="true")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for row in places:
        axes.text(n_classes - 0.3, row, f"{counts[row]:,}", fontsize=size - 1, color=GREY, va="center")
    if n_classes <= FEW_CLASSES:
        _write_shares(axes, shares)
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 2.5 / edge), pad=0.02 + 0.35 / edge, label="share of the row")
    bar.outline.set_visible(False)
    return figure


def _write_shares(axes: Axes, shares: np.ma.MaskedArray) -> None:
    for (row, column), share in np.ma.ndenumerate(shares):
        if share > 0:
            colour = "white" if share > DARK else "black"
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)
