"""Accuracy over the length of the sequences: what a model keeps of sequences longer than those it was trained on."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from recurra.analysis.plots.direct_labels import label_ends
from recurra.analysis.plots.figure import distinct_looks, house_style, new_figure
from recurra.checks import require

HEIGHT = 3.4
"""Inches."""


@house_style()
def accuracy_over_length(
    curves: Mapping[str, Sequence[tuple[int, float]]], *, trained: Sequence[int], chance: float | None = None
) -> Figure:
    """Draw accuracy over the length of test sequences, in doublings, with a curve for each model.

    Args:
        curves: (length in tokens, accuracy in [0, 1]) of each model, in any order, by its name.
        trained: the longest sequences in training, one length for all models or several; each is marked by a line.
        chance: the accuracy of guesses, marked by a line; None draws none.

    Raises:
        ValueError: there is no curve, a curve has no points, or a number is outside its range.
    """
    require(len(curves) > 0, "curves", dict(curves), "at least one curve")
    for name, points in curves.items():
        require(len(points) > 0, f"curves[{name!r}]", list(points), "at least one point")
        for length, accuracy in points:
            fits = length >= 1 and 0.0 <= accuracy <= 1.0
            require(fits, f"a point of curves[{name!r}]", (length, accuracy), "a length and an accuracy in [0, 1]")
    figure = new_figure(7.2, HEIGHT)
    axes = figure.subplots()
    lines = {}
    for (name, points), (colour, style) in zip(curves.items(), distinct_looks()):
        lengths, accuracies = zip(*sorted(points))
        (lines[name],) = axes.plot(lengths, accuracies, label=name, color=colour, linestyle=style, marker="o", ms=3)
    axes.set_xscale("log", base=2)
    every = sorted({length for points in curves.values() for length, _ in points})
    axes.xaxis.set_major_locator(FixedLocator(every))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: short_number(round(length))))
    axes.set(xlabel="tokens in a test sequence", ylabel="test accuracy", ylim=(-0.03, 1.03))
    for length in sorted(set(trained)):
        axes.axvline(length, color="0.6", linewidth=0.8, zorder=0)
        text = " trained up to here" if len(set(trained)) == 1 else f" trained up to {length}"
        axes.text(length, 0.0, text, fontsize=7, color="0.4", verticalalignment="bottom")
    if chance is not None:
        axes.axhline(chance, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
    axes.grid(axis="y")
    label_ends(axes, lines, HEIGHT * 0.8)
    return figure


def short_number(number: int) -> str:
    """Write a number with the largest binary prefix that divides it: 64, 1k, 512k, 1M."""
    for exponent, prefix in ((20, "M"), (10, "k")):
        if number and number % 2**exponent == 0:
            return f"{number // 2**exponent}{prefix}"
    return str(number)
