"""`recurra classify`: classify videos segment by segment while they are read."""

import csv
import io
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from recurra._files.writing import replacing
from recurra._process import chosen_device
from recurra.checks import require_at_least, require_positive, sentence
from recurra.train.run import Run, open_run
from recurra.video.reader import VideoError
from recurra.video.task import ContactSheet, SegmentPrediction, classify_video

_Write = Callable[[str, SegmentPrediction], None]


def classify(arguments: Namespace) -> int:
    require_at_least(1, **{"--top": arguments.top})
    if arguments.rate is not None:
        require_positive(**{"--rate": arguments.rate})
    stems = [Path(video).stem for video in arguments.videos]
    if len(set(stems)) < len(stems):
        got = f"several with the names {', '.join(stems)}"
        raise ValueError(sentence("videos", got, "files with different names", "each names a contact sheet"))
    device = chosen_device(arguments.device, "--device")
    trained = open_run(arguments.run, checkpoint=arguments.checkpoint, overrides=arguments.overrides)
    trained.model.to(device)
    names = trained.class_names
    folder = arguments.out or trained.folder.figures
    bad: list[str] = []
    with ExitStack() as stack:
        write = _table(stack.enter_context(replacing(arguments.csv)), names) if arguments.csv else None
        for video in arguments.videos:
            print(video)
            sheet, n_bad = ContactSheet(names), len(bad)
            for prediction in _predictions(trained, video, arguments.rate, sheet, bad):
                print(_line(prediction, names, arguments.top), flush=True)
                if write is not None:
                    write(video, prediction)
            if len(bad) == n_bad:
                print(sheet.draw(folder, f"classify-{Path(video).stem}"), flush=True)
        if len(bad) == len(arguments.videos):
            raise VideoError(_listed(bad, len(bad)))  # inside, so that no empty table is written
    if bad:
        raise VideoError(_listed(bad, len(arguments.videos)))
    return 0


def _predictions(
    trained: Run, video: str, rate: float | None, sheet: ContactSheet, bad: list[str]
) -> Iterator[SegmentPrediction]:
    """Classify a video; where it cannot be read, end, and add the reason to `bad`."""
    try:
        yield from classify_video(trained, video, rate=rate, sheet=sheet)
    except (VideoError, OSError) as error:
        bad.append(str(error))


def _listed(bad: Sequence[str], n_videos: int) -> str:
    if n_videos == 1:
        return bad[0]
    return "\n  ".join([f"{len(bad)} of {n_videos} videos could not be read to the end:", *bad])


def _line(prediction: SegmentPrediction, names: Sequence[str], top: int) -> str:
    likeliest = prediction.probabilities.topk(min(top, len(names)))
    guesses = (f"{names[i]} {p:.3f}" for p, i in zip(likeliest.values.tolist(), likeliest.indices.tolist()))
    n = prediction.n_repeated
    repeated = f"  (the video ends within this segment; its last frame is repeated {n} times)" if n else ""
    return f"  {prediction.start:8.2f} to {prediction.end:8.2f} s  {', '.join(guesses)}{repeated}"


def _table(file: BinaryIO, names: Sequence[str]) -> _Write:
    table = csv.writer(io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True), lineterminator="\n")
    table.writerow(["video", "start", "end", "repeated_frames", *names])

    def write(path: str, prediction: SegmentPrediction) -> None:
        place = prediction.start, prediction.end, prediction.n_repeated
        table.writerow([path, *place, *prediction.probabilities.tolist()])

    return write
