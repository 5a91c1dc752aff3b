"""A video run applied to a video: predictions segment by segment, and a contact sheet of what was seen."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from recurra.analysis.plots import contact_sheet, save_png
from recurra.analysis.thinned import Thinned
from recurra.checks import require_positive
from recurra.data.video import VideoFile, evaluation_crops
from recurra.data.video.transforms import resize_short_side
from recurra.evaluation import SegmentPrediction, classify_stream
from recurra.models import VideoSizes
from recurra.runs.run import Run

MAX_FRAMES = 32
"""Maximum number of frames on a contact sheet."""
MAX_SEGMENTS = 1024
"""Maximum number of points in a line of a contact sheet."""
THUMBNAIL = 112
"""Pixels of the shorter side of a frame on a contact sheet."""


class ContactSheet:
    """Frames and probabilities of a stream for a figure: a bounded number of them, however long the stream is.

    Args:
        class_names: the names of the classes.
    """

    def __init__(self, class_names: Sequence[str]) -> None:
        self.class_names = class_names
        self.frames: Thinned[tuple[float, Tensor]] = Thinned(MAX_FRAMES)
        self.segments: Thinned[tuple[float, Tensor]] = Thinned(MAX_SEGMENTS)

    def draw(self, folder: Path, name: str) -> Path:
        """Draw the sheet as FOLDER/NAME.png, and return its path."""
        times, frames = zip(*self.frames.items)
        ends, probabilities = zip(*self.segments.items)
        figure = contact_sheet(torch.stack(frames), times, ends, torch.stack(probabilities), self.class_names)
        return save_png(figure, folder, name)


def classify_video(
    run: Run, path: Path | str, *, rate: float | None = None, sheet: ContactSheet | None = None
) -> Iterator[SegmentPrediction]:
    """Stream a video through a video model in constant memory, and yield a prediction after each segment.

    Args:
        run: a video run.
        path: the video.
        rate: frames per second; None is the rate of training.
        sheet: collects what is needed to draw a contact sheet.

    Raises:
        VideoError: the file is not a video.
        ValueError: the run is not over videos, or `rate` is no finite number above 0.
    """
    if rate is not None:
        require_positive(rate=rate)
    if run.task.reads is not VideoSizes:
        raise run.task.refusal(run, "over videos")
    data = run.experiment.data
    with VideoFile(path) as file:
        rate, n_frames = data.clip_rate(file.probe()) if rate is None else (rate, None)
        frames = islice(_prepared(file, rate, data.image_size, sheet), n_frames)
        for prediction in classify_stream(run.model, frames, n_frames=data.n_frames, frame_seconds=1 / rate):
            if sheet is not None:
                sheet.segments.add((prediction.end, prediction.probabilities))
            yield prediction


def _prepared(
    file: VideoFile, rate: float, image_size: int, sheet: ContactSheet | None
) -> Iterator[tuple[float, Tensor]]:
    """The frames as the model reads them; the sheet gets small ones."""
    for time, picture in file.frames(rate):
        if sheet is not None:
            small = resize_short_side(picture[None].float(), THUMBNAIL)[0]
            sheet.frames.add((time, small.round().to(torch.uint8).permute(1, 2, 0)))
        yield time, evaluation_crops(picture[None], image_size=image_size)[0, 0]
