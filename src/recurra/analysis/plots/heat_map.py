"""One channel-by-time picture, as Figures 5 and 8 of GateLoop stack them."""

from collections.abc import Sequence

from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from torch import Tensor

from recurra.analysis.plots.figure import GREY

MAGNITUDE_COLOURS = "viridis"
SHARP_STEPS, SHARP_CHANNELS = 1500, 80
"""As many as get a pixel each in the smallest heat map of a saved PNG."""


def heat_map(
    axes: Axes, values: Float[Tensor, "L channels"], colours: str, limits: tuple[float, float]
) -> ScalarMappable:
    """Fill the axes with values: time to the right, the first channel on top.

    Where every value gets a pixel they are drawn sharp, and an SVG holds each value once. Where there are
    too many neighbours are averaged: leaving some out could lose a gate that closes for one step.

    Args:
        axes: to draw in.
        values: one per step and channel.
        colours: the name of a matplotlib colour map.
        limits: the values that get the first and the last colour.

    Returns:
        What a colour bar is made for.
    """
    n_steps, n_channels = values.shape
    sharp = n_steps <= SHARP_STEPS and n_channels <= SHARP_CHANNELS
    image = axes.imshow(
        values.T.numpy(),
        aspect="auto",
        interpolation="none" if sharp else "antialiased",
        cmap=colours,
        vmin=limits[0],
        vmax=limits[1],
        extent=(-0.5, n_steps - 0.5, n_channels - 0.5, -0.5),
    )
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    return image


def label_row(axes: Axes, text: str) -> None:
    """Write what a row shows to its left, upright, so that it fits however low the row is."""
    axes.set_ylabel(text, rotation=0, horizontalalignment="right", verticalalignment="center")


def mark_steps(axes: Axes, steps: Sequence[int]) -> None:
    """Put a triangle over each of the steps, just above the axes, where it hides no data."""
    if not steps:  # a line without points, drawn outside of the axes, would break the layout
        return
    axes.plot(
        steps,
        [1.0] * len(steps),
        transform=axes.get_xaxis_transform(),
        linestyle="none",
        marker=7,  # a triangle that stands on its tip, the tip at the position
        color=GREY,
        clip_on=False,
    )
