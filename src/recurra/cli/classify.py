"""`recurra classify`: what a video shows, said segment by segment while it is read."""

import csv
import io
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from recurra.analysis.plots import contact_sheet, save_png
from recurra.analysis.thinned import Thinned
from recurra.cli.arguments import command_parser, split_overrides
from recurra.data.files import replacing
from recurra.data.video import FrameSampling, VideoConfig, VideoFile, evaluation_crops
from recurra.data.video.transforms import resize_short_side
from recurra.evaluation import SegmentPrediction, classify_stream
from recurra.runs import Run, open_run
from recurra.training import VideoExperiment

DESCRIPTION = (
    "Read videos as streams, segment by segment with the carried state and in constant memory, and print what the "
    "model says after each segment. A contact sheet of the frames and the probabilities over time is drawn for each."
)
SHOWN_FRAMES = 32
"""At most so many are on a contact sheet."""
SHOWN_SEGMENTS = 1024
"""At most so many points has a line of a contact sheet."""
THUMBNAIL = 112
"""Pixels of the shorter side of a frame on a contact sheet."""


Write = Callable[[str, SegmentPrediction], None]


class Seen(NamedTuple):
    """What is kept of a stream for its contact sheet."""

    frames: Thinned[tuple[float, Tensor]]
    segments: Thinned[tuple[float, Tensor]]


def run(words: Sequence[str]) -> int:
    """Classify; print a line for each segment and the path of each picture."""
    own, overrides = split_overrides(words)
    parser = _parser()
    arguments = parser.parse_args(own)
    if arguments.top < 1:
        raise ValueError(f"--top must be 1 or more, got {arguments.top}")
    if arguments.rate is not None and not arguments.rate > 0:
        raise ValueError(f"--rate must be greater than 0, got {arguments.rate}")
    if len({Path(video).stem for video in arguments.videos}) < len(arguments.videos):
        raise ValueError("the videos must have different names: each names its contact sheet")
    trained = open_run(arguments.run, checkpoint=arguments.checkpoint, overrides=overrides)
    folder = Path(arguments.out) if arguments.out else trained.folder.figures
    with ExitStack() as stack:
        names = trained.class_names
        write = _table(stack.enter_context(replacing(Path(arguments.csv))), names) if arguments.csv else None
        for video in arguments.videos:
            print(video)
            seen = classify(trained, video, arguments.rate, arguments.top, write)
            print(_draw(seen, names, folder, f"classify-{Path(video).stem}"), flush=True)
    return 0


def classify(trained: Run, path: str, rate: float | None, top: int, write: Write | None) -> Seen:
    """Stream one video through a model and print what it says.

    Args:
        trained: a run of a video model.
        path: the video.
        rate: frames per second; None: as in training.
        top: how many classes to print.
        write: is given the path and the prediction for each segment.

    Raises:
        VideoError: the file is no video.
    """
    experiment = trained.experiment
    assert isinstance(experiment, VideoExperiment)  # what has class names is
    data = experiment.data
    seen = Seen(Thinned(SHOWN_FRAMES), Thinned(SHOWN_SEGMENTS))
    with VideoFile(path) as file:
        rate = rate or _training_rate(experiment, file)
        frames = _prepared(file, rate, data.image_size, seen)
        for said in classify_stream(trained.model, frames, n_frames=data.n_frames, frame_seconds=1 / rate):
            seen.segments.add((said.end, said.probabilities))
            print(_line(said, trained.class_names, top), flush=True)
            if write is not None:
                write(path, said)
    return seen


def _parser() -> ArgumentParser:
    parser = command_parser("classify", DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("videos", nargs="+", metavar="VIDEO", help="video files")
    parser.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="frames per second to look at (default: as in training; where a training clip spans a whole video, so "
        "many that this one has as many segments as a clip)",
    )
    parser.add_argument("--top", type=int, default=3, metavar="N", help="classes to print (default: 3)")
    parser.add_argument("--csv", metavar="FILE", help="write the probabilities of all classes after each segment")
    parser.add_argument("--out", metavar="FOLDER", help="for the contact sheets (default: the RUN's figures)")
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best (default), last, previous or a file"
    )
    return parser


def _training_rate(experiment: VideoExperiment, file: VideoFile) -> float:
    """Frames per second at which a training clip shows such a video."""
    data = experiment.data
    n_frames = data.n_segments * data.n_frames
    if not isinstance(data, VideoConfig):  # motions: a clip spans a whole video
        return n_frames / file.probe().duration
    sampling = FrameSampling(n_frames, data.frame_rate, data.frame_stride)
    return sampling.rate or n_frames / sampling.seconds(file.probe())


def _prepared(file: VideoFile, rate: float, image_size: int, seen: Seen) -> Iterator[tuple[float, Tensor]]:
    """The frames as the model reads them; some of them are kept, small, for the contact sheet."""
    for time, picture in file.frames(rate):
        small = resize_short_side(picture[None].float(), THUMBNAIL)[0]
        seen.frames.add((time, small.round().to(torch.uint8).permute(1, 2, 0)))
        yield time, evaluation_crops(picture[None], image_size=image_size)[0, 0]


def _line(said: SegmentPrediction, names: Sequence[str], top: int) -> str:
    """A segment in words."""
    likeliest = said.probabilities.topk(min(top, len(names)))
    guesses = (f"{names[i]} {p:.3f}" for p, i in zip(likeliest.values.tolist(), likeliest.indices.tolist()))
    repeated = f"  (ends within the segment: its last frame stands {said.n_repeated} more times)"
    return f"  {said.start:8.2f} to {said.end:8.2f} s  {', '.join(guesses)}{repeated if said.n_repeated else ''}"


def _table(file: BinaryIO, names: Sequence[str]) -> Write:
    """A CSV file that gets a row as each segment is said, and what adds one."""

    def row(cells: Sequence[object]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        file.write(text.getvalue().encode())

    def write(path: str, said: SegmentPrediction) -> None:
        row([path, said.start, said.end, said.n_repeated, *said.probabilities.tolist()])

    row(["video", "start", "end", "repeated_frames", *names])
    return write


def _draw(seen: Seen, names: Sequence[str], folder: Path, name: str) -> Path:
    times, frames = zip(*seen.frames.items)
    ends, probabilities = zip(*seen.segments.items)
    figure = contact_sheet(torch.stack(frames), times, ends, torch.stack(probabilities), names)
    return save_png(figure, folder, name)
