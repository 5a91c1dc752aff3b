"""Frames of a stream and a model's predictions for it, in one picture."""

import math
from collections.abc import Sequence
from itertools import cycle

import torch
from jaxtyping import Float, UInt8
from matplotlib.figure import Figure
from torch import Tensor

from recurra.analysis.plots.figure import COLOURS, GREY, LINE_STYLES, house_style, new_figure

_COLUMNS = 8
"""Frames per row."""
_CLASSES = 6
"""Maximum number of classes with a line."""
_WIDTH = 9.0
"""Width of the figure in inches."""
_FEW_SEGMENTS = 60
"""Up to this many segments, each has a marker at its end."""


@house_style()
def contact_sheet(
    frames: UInt8[Tensor, "N H W 3"],
    frame_times: Sequence[float],
    ends: Sequence[float],
    probabilities: Float[Tensor, "S C"],
    names: Sequence[str],
) -> Figure:
    """Draw frames with their times in rows, and below them the probabilities of the likeliest classes over time.

    The lines show the classes with the highest probability at any time.

    Args:
        frames: some or all of the frames that the model read; RGB.
        frame_times: the time of each frame, in seconds.
        ends: the end of each segment, in seconds.
        probabilities: of each class after each segment.
        names: the names of the classes.
    """
    n_rows = math.ceil(len(frames) / _COLUMNS)
    row_height = _WIDTH / _COLUMNS * frames.shape[1] / frames.shape[2] + 0.22
    figure = new_figure(_WIDTH, n_rows * row_height + 2.6)
    sheet, chart = figure.subfigures(2, 1, squeeze=False, height_ratios=[n_rows * row_height, 2.6])[:, 0]
    for place, axes in enumerate(sheet.subplots(n_rows, _COLUMNS, squeeze=False).flat):
        axes.axis("off")
        if place < len(frames):
            axes.imshow(frames[place].numpy())
            axes.set_title(_clock(frame_times[place]), fontsize=7, color=GREY, pad=2)
    axes = chart.subplots()
    marker = "o" if len(ends) <= _FEW_SEGMENTS else ""
    colours, styles = cycle(COLOURS), cycle(LINE_STYLES)
    for index in _shown_classes(probabilities, _CLASSES):
        # not clipped, for the last point lies on the edge
        line = {"color": next(colours), "linestyle": next(styles), "marker": marker, "clip_on": False}
        axes.plot(ends, probabilities[:, index].numpy(), label=names[index], **line)
    axes.set(xlabel="seconds (end of the segment)", ylabel="probability", ylim=(-0.02, 1.02))
    axes.set_xlim(0, max(ends[-1], frame_times[-1]))
    axes.grid(axis="y")
    chart.legend(loc="outside right center")
    return figure


def _shown_classes(probabilities: Float[Tensor, "S C"], n: int) -> list[int]:
    """Return the n classes with the highest probability at any time, in falling order."""
    highest = probabilities.amax(0)
    return torch.argsort(highest, descending=True, stable=True)[:n].tolist()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{rest:.1f} s" if not minutes else f"{int(minutes)}:{rest:04.1f}"
