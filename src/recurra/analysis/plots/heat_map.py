"""One channel-by-time heat map, the building block of Figures 5 and 8 of GateLoop."""

from collections.abc import Sequence

from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from torch import Tensor

from recurra.analysis.plots.figure import GREY

MAGNITUDE_COLOURS = "viridis"
SHARP_STEPS, SHARP_CHANNELS = 1500, 80
"""The numbers that get a pixel each in the smallest heat map of a saved PNG."""


def heat_map(
    axes: Axes, values: Float[Tensor, "L channels"], colours: str, limits: tuple[float, float]
) -> ScalarMappable:
    """Fill the axes with values: time to the right, the first channel on top.

    If each value gets a pixel, values are drawn sharply, and an SVG holds each of them once. Otherwise neighbours are
    averaged, because omitting some could hide a gate that closes for one step.

    Args:
        axes: where to draw.
        values: one per step and channel.
        colours: the name of a matplotlib colour map.
        limits: the values of the first and the last colour.

    Returns:
        The image, for a colour bar.
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
    """Write the label of a row horizontally to its left, so that it fits even a low row."""
    axes.set_ylabel(text, rotation=0, horizontalalignment="right", verticalalignment="center")


def mark_steps(axes: Axes, steps: Sequence[int]) -> None:
    """Put a triangle over each of the steps, just above the axes, where it hides no data."""
    if not steps:  # a line without points, drawn outside the axes, would break the layout
        return
    axes.plot(
        steps,
        [1.0] * len(steps),
        transform=axes.get_xaxis_transform(),
        linestyle="none",
        marker=7,  # a triangle pointing down, with its tip at the position
        color=GREY,
        clip_on=False,
    )
