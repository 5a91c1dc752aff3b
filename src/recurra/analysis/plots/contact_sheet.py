"""What a stream of frames showed, and what a model made of it, in one picture."""

import math
from collections.abc import Sequence
from itertools import cycle

import torch
from jaxtyping import Float, UInt8
from matplotlib.figure import Figure
from torch import Tensor

from recurra.analysis.plots.figure import COLOURS, GREY, LINE_STYLES, house_style, new_figure

COLUMNS = 8
"""Frames in a row."""
CLASSES = 6
"""Classes that get a line, as far as there are so many."""
WIDTH = 9.0
"""Inches."""
FEW_SEGMENTS = 60
"""With no more segments than this each has a mark at its end."""


@house_style()
def contact_sheet(
    frames: UInt8[Tensor, "N H W 3"],
    frame_times: Sequence[float],
    ends: Sequence[float],
    probabilities: Float[Tensor, "S C"],
    names: Sequence[str],
) -> Figure:
    """Draw frames in rows, each with its time, and below them the probabilities of the likeliest classes over time.

    The lines are those of the classes that were most probable at any one time.

    Args:
        frames: what the model saw, or some of it; RGB.
        frame_times: when each frame was, in seconds.
        ends: where each segment ended, in seconds: the probabilities are what the model said then.
        probabilities: of each class after each segment.
        names: of the classes.

    Raises:
        ValueError: there is no frame or no segment, or the numbers of times, ends or names are others.
    """
    if not len(frames) or len(frame_times) != len(frames):
        raise ValueError(f"frame_times must hold one time for each of one or more frames, got {len(frame_times)}")
    if not len(probabilities) or (len(ends), len(names)) != tuple(probabilities.shape):
        raise ValueError(
            f"probabilities are of {tuple(probabilities.shape)} segments and classes; expected one or more segments, "
            f"as many as ends and names: {len(ends)} and {len(names)}"
        )
    n_rows = math.ceil(len(frames) / COLUMNS)
    row_height = WIDTH / COLUMNS * frames.shape[1] / frames.shape[2] + 0.22
    figure = new_figure(WIDTH, n_rows * row_height + 2.6)
    sheet, chart = figure.subfigures(2, 1, squeeze=False, height_ratios=[n_rows * row_height, 2.6])[:, 0]
    for place, axes in enumerate(sheet.subplots(n_rows, COLUMNS, squeeze=False).flat):
        axes.axis("off")
        if place < len(frames):
            axes.imshow(frames[place].numpy())
            axes.set_title(_clock(frame_times[place]), fontsize=7, color=GREY, pad=2)
    axes = chart.subplots()
    marker = "o" if len(ends) <= FEW_SEGMENTS else ""
    colours, styles = cycle(COLOURS), cycle(LINE_STYLES)
    for index in shown_classes(probabilities, CLASSES):
        line = {"color": next(colours), "linestyle": next(styles), "marker": marker}
        axes.plot(ends, probabilities[:, index].numpy(), label=names[index], **line)
    axes.set(xlabel="seconds (end of the segment)", ylabel="probability", ylim=(-0.02, 1.02))
    axes.set_xlim(0, max(ends[-1], frame_times[-1]))
    axes.grid(axis="y")
    chart.legend(loc="outside right center")
    return figure


def shown_classes(probabilities: Float[Tensor, "S C"], n: int) -> list[int]:
    """The classes that were most probable at any one time, the first of them first; at most n."""
    highest = probabilities.amax(0)
    return torch.argsort(highest, descending=True, stable=True)[:n].tolist()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{rest:.1f} s" if not minutes else f"{int(minutes)}:{rest:04.1f}"
