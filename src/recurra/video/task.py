"""Video as a task: data, scores and figures; a video as a stream; and a run applied to a video."""

# ruff: noqa: D102 - the methods of a task are documented in `recurra.train.task`
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra._files.reading import read_text
from recurra._files.writing import replacing
from recurra.analysis.gradient_flow import Thinned
from recurra.checks import require, require_positive, sentence
from recurra.data.batches import IGNORED_TARGET, DataSet
from recurra.models.registry import ModelEntry, VideoSizes
from recurra.models.shell import evaluation_mode
from recurra.train.experiment import Experiment
from recurra.train.run import Run
from recurra.train.run_folder import RunFolder
from recurra.train.task import Task, find_experiment, register_task
from recurra.video._published import start_from
from recurra.video.clips import evaluation_crops, resize_short_side
from recurra.video.data import VideoConfig, VideoData, ViewBatch
from recurra.video.motions import MotionsConfig
from recurra.video.reader import VideoFile


@register_task("video")
class VideoTask(Task):
    """Beside a run lie the names of its classes, in their order."""

    data: ClassVar[type[Any]] = VideoConfig
    reads = VideoSizes
    unit = "frames"
    default_model = None
    drawn_scores = ("confusion", "class_accuracies")

    def check(self, experiment: Experiment) -> None:
        model: Any = find_experiment(experiment.experiment)[1].model
        if not model.learns_from_poses:
            require(getattr(experiment.data, "poses", None) is None, "data.poses", "a folder", "null but for PI-ViT")

    def open_data(self, data: Any, folder: RunFolder, *, rank: int = 0, world_size: int = 1) -> DataSet:
        opened: Any = self.build_data(data, rank=rank, world_size=world_size)
        if folder.classes.exists() and tuple(opened.class_names) != read_classes(folder):
            raise ValueError(sentence("data.path", "videos of other classes", f"those in {folder.classes}"))
        return opened

    def fingerprint(self, opened: VideoData) -> str | None:
        return opened.fingerprint()

    def sizes(self, data: Any, opened: Any) -> VideoSizes:
        return VideoSizes(opened.output_size, data.n_frames, data.image_size)

    def sizes_of_run(self, run: Any) -> VideoSizes:
        data = run.experiment.data
        return VideoSizes(len(run.class_names), data.n_frames, data.image_size)

    def load_initial_weights(self, model: nn.Module, path: str, data: DataSet | None = None) -> str:
        return start_from(model, path)  # type: ignore[arg-type]

    def save_extras(self, opened: VideoData, folder: RunFolder) -> None:
        """Write the names of the classes, one per line; refuse those that cannot be lines of a file."""
        bad = next((name for name in opened.class_names if not _can_be_listed(name)), None)
        if bad is not None:
            raise ValueError(sentence("the name of a class", repr(bad), "letters, and no control characters"))
        with replacing(folder.classes) as file:
            file.write("".join(f"{name}\n" for name in opened.class_names).encode())

    def class_names(self, run: Any) -> tuple[str, ...]:
        return read_classes(run.folder) if run.folder.classes.exists() else tuple(run.data.class_names)

    def score(self, run: Any, split: Any, temperature: float | None) -> dict[str, Any]:
        require(temperature is None, "temperature", temperature, "None for a run over videos")
        model, data = run.model, run.data
        views = data.views(split)
        start = perf_counter()
        said = classify_videos(model, views)
        seconds = perf_counter() - start
        scores = class_scores(said.probabilities, said.targets)
        names, seen = data.class_names, (scores.counts > 0).tolist()
        return {
            "mean_class_accuracy": scores.mean_class_accuracy,
            "top_1": scores.top_1,
            "top_5": scores.top_5,
            "n_videos": len(said.targets),
            "n_videos_left_out": len(data.videos(split)) - len(said.targets),
            "classes_without_videos": [name for name, there in zip(names, seen) if not there],
            "views": views.n_views,
            "crops": views.n_crops,
            "class_accuracies": {
                name: accuracy if there else None
                for name, accuracy, there in zip(names, scores.class_accuracies.tolist(), seen)
            },
            "confusion": scores.confusion.tolist(),
            "seconds": seconds,
            "frames_per_second": said.n_frames / seconds,
        }

    def best_temperature(self, run: Any) -> float:
        # views' scores are averaged without a temperature
        raise ValueError(sentence("the run", "over videos", "one over tokens"))

    def figures_of_scores(self, run: Any, split: str, scores: Mapping[str, Any]) -> list[Path]:
        from recurra.analysis.plots.figure import save  # loads matplotlib
        from recurra.analysis.plots.scores import confusion_matrix

        name = run.score_file(split).stem.replace("eval", "confusion", 1)
        figure = confusion_matrix(torch.tensor(scores["confusion"]), list(scores["class_accuracies"]))
        return save(figure, run.folder.figures, name)


@register_task("motions")
class MotionsTask(VideoTask):
    """The generated motions, which are written on first use."""

    data = MotionsConfig

    def fingerprint(self, opened: VideoData) -> None:
        return None  # the configuration determines the videos; their bytes depend on the encoder

    def models(self) -> list[ModelEntry]:
        return [entry for entry in super().models() if not getattr(entry.model, "learns_from_poses", False)]


def read_classes(folder: RunFolder) -> tuple[str, ...]:
    """Read the names of the classes in a video run's folder, in their order."""
    names = tuple(read_text(folder.classes).removesuffix("\n").split("\n"))
    if len(set(names)) < len(names) or not all(map(_can_be_listed, names)):
        raise ValueError(sentence(str(folder.classes), "damaged", "the distinct names of the classes, one per line"))
    return names


def _can_be_listed(name: str) -> bool:
    """Whether a class of this name can be a line of a file: it has letters, and no control characters."""
    return bool(name.strip()) and not any(unicodedata.category(letter) == "Cc" for letter in name)


_TOP = 5
"""The number of guesses that the second score allows; datasets with no more classes than this have no such score."""


class _ClassScores(NamedTuple):
    """Scores on the CPU: each class's examples in `counts`, and NaN among the accuracies for one without any.

    mean_class_accuracy: of the classes that have examples, each with the same weight. top_5: None with five classes or
    fewer.
    """

    confusion: Int[Tensor, "C C"]
    counts: Int[Tensor, " C"]
    class_accuracies: Float[Tensor, " C"]
    mean_class_accuracy: float
    top_1: float
    top_5: float | None


def class_scores(probabilities: Float[Tensor, "N C"], targets: Int[Tensor, " N"]) -> _ClassScores:
    """Count which class was predicted for which: the likeliest one, and the first of those that tie.

    Args:
        probabilities: of each class for each example; any values that rank the classes will do.
        targets: the true class of each example.
    """
    if bool(probabilities.isnan().any()):
        hint = "check that the model's weights and its input are finite"
        raise FloatingPointError(sentence("a probability", "NaN", "a number", hint))
    probabilities, targets = probabilities.cpu(), targets.cpu().long()  # for the product below
    n_classes, n_examples = probabilities.shape[1], len(targets)
    pairs = targets * n_classes + probabilities.argmax(1)
    confusion = torch.bincount(pairs, minlength=n_classes**2).view(n_classes, n_classes)
    counts = confusion.sum(1)
    accuracies = confusion.diagonal().double() / counts
    top_5 = None
    if n_classes > _TOP:
        guesses = probabilities.argsort(dim=1, descending=True, stable=True)[:, :_TOP]
        top_5 = int((guesses == targets[:, None]).any(1).sum()) / n_examples
    top_1 = int(confusion.diagonal().sum()) / n_examples
    return _ClassScores(confusion, counts, accuracies, float(accuracies.nanmean()), top_1, top_5)


class _VideoProbabilities(NamedTuple):
    """A model's predictions for videos, on the CPU."""

    probabilities: Float[Tensor, "N C"]
    targets: Int[Tensor, " N"]
    n_frames: int


def classify_videos(model: nn.Module, views: Iterable[ViewBatch]) -> _VideoProbabilities:
    """Run a model over views of videos, each from the start of a stream, without autocast or gradients.

    Args:
        model: called as `model(clips, None) -> (logits, state)`, logits (B, S, C), in evaluation mode.
        views: the views, in any order and in batches of any size. A view whose last target is `IGNORED_TARGET` is
            skipped.
    """
    device = next(model.parameters()).device
    totals: dict[int, Tensor] = {}
    n_views: dict[int, int] = defaultdict(int)
    targets: dict[int, int] = {}
    n_frames = 0
    with evaluation_mode(model), torch.inference_mode(), torch.autocast(device.type, enabled=False):
        for batch in views:
            logits = model(batch.inputs.to(device), None)[0][:, -1]
            n_frames += batch.inputs.shape[0] * batch.inputs.shape[1]
            of_views = zip(batch.videos.tolist(), batch.targets[:, -1].tolist(), logits.double().softmax(-1).cpu())
            for video, target, probabilities in of_views:
                if target != IGNORED_TARGET:
                    totals[video] = totals[video] + probabilities if video in totals else probabilities
                    n_views[video] += 1
                    targets[video] = target
    if not totals:
        hint = "check that the dataset has videos and that they can be decoded"
        raise ValueError(sentence("views", "without a view to score", "at least one", hint))
    videos = sorted(totals)
    return _VideoProbabilities(
        torch.stack([totals[video] / n_views[video] for video in videos]),
        torch.tensor([targets[video] for video in videos]),
        n_frames,
    )


class SegmentPrediction(NamedTuple):
    """A model's prediction after a segment.

    start, end: of the segment, in seconds; its last frame lasts until `end`.
    probabilities: of each class, given this segment and the state carried from earlier ones; on the CPU.
    n_repeated: how many times the last frame was repeated to fill a segment cut short by the end of the stream.
    """

    start: float
    end: float
    probabilities: Float[Tensor, " C"]
    n_repeated: int


def _classify_stream(
    model: nn.Module, frames: Iterable[tuple[float, Tensor]], *, n_frames: int, frame_seconds: float
) -> Iterator[SegmentPrediction]:
    """Read frames as they arrive and yield a prediction after each segment."""
    device = next(model.parameters()).device
    state: Any = None
    segment: list[Tensor] = []
    start = time = 0.0
    n_segments = 0

    def predict(n_repeated: int) -> SegmentPrediction:
        nonlocal state
        clip = torch.stack(segment + segment[-1:] * n_repeated)[None].to(device)
        with evaluation_mode(model), torch.inference_mode():
            logits, state = model(clip, state)
        return SegmentPrediction(start, time + frame_seconds, logits[0, -1].float().softmax(-1).cpu(), n_repeated)

    for time, frame in frames:
        start = start if segment else time
        segment.append(frame)
        if len(segment) == n_frames:
            yield predict(0)
            segment, n_segments = [], n_segments + 1
    if segment:
        yield predict(n_frames - len(segment))
    elif not n_segments:
        raise ValueError(sentence("frames", "empty", "at least one frame to classify"))


_MAX_FRAMES = 32
"""Maximum number of frames on a contact sheet."""
_MAX_SEGMENTS = 1024
"""Maximum number of points in a line of a contact sheet."""
_THUMBNAIL = 112
"""Pixels of the shorter side of a frame on a contact sheet."""


class ContactSheet:
    """Frames and probabilities of a stream for a figure: a bounded number of them, however long the stream is.

    Args:
        class_names: the names of the classes.
    """

    def __init__(self, class_names: Sequence[str]) -> None:
        self.class_names = class_names
        self.frames: Thinned[tuple[float, Tensor]] = Thinned(_MAX_FRAMES)
        self.segments: Thinned[tuple[float, Tensor]] = Thinned(_MAX_SEGMENTS)

    def draw(self, folder: Path, name: str) -> Path:
        """Draw the sheet as FOLDER/NAME.png, and return its path."""
        from recurra.analysis.plots.figure import save_png  # loads matplotlib
        from recurra.analysis.plots.scores import contact_sheet

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
    """
    if rate is not None:
        require_positive(rate=rate)
    if run.task.reads is not VideoSizes:
        raise run.task.refusal(run, "over videos")
    data = run.experiment.data
    with VideoFile(path) as file:
        rate, n_frames = data.clip_rate(file.probe()) if rate is None else (rate, None)
        frames = islice(_prepared(file, rate, data.image_size, sheet), n_frames)
        for prediction in _classify_stream(run.model, frames, n_frames=data.n_frames, frame_seconds=1 / rate):
            if sheet is not None:
                sheet.segments.add((prediction.end, prediction.probabilities))
            yield prediction


def _prepared(
    file: VideoFile, rate: float, image_size: int, sheet: ContactSheet | None
) -> Iterator[tuple[float, Tensor]]:
    for time, picture in file.frames(rate):
        if sheet is not None:
            small = resize_short_side(picture[None].float(), _THUMBNAIL)[0]
            sheet.frames.add((time, small.round().to(torch.uint8).permute(1, 2, 0)))
        yield time, evaluation_crops(picture[None], image_size=image_size)[0, 0]
