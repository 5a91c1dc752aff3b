"""Video: classification of clips of several segments, and of the generated motions."""

import unicodedata
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import nn

from recurra.checks import require, sentence
from recurra.data import DataSet
from recurra.data.video import MotionsConfig, VideoConfig, VideoData
from recurra.evaluation import class_scores, classify_videos
from recurra.files.reading import read_text
from recurra.files.writing import replacing
from recurra.models import ModelEntry, VideoSizes
from recurra.training.experiment import Experiment
from recurra.training.run_folder import RunFolder
from recurra.training.starting_weights import start_from
from recurra.training.task import Task, find_experiment, register_task


@register_task("video")
class VideoTask(Task):
    """Beside a run lie the names of its classes, in their order."""

    data: ClassVar[type[Any]] = VideoConfig
    reads = VideoSizes
    unit = "frames"
    default_model = None
    drawn_scores = ("confusion", "class_accuracies")

    def check(self, experiment: Experiment) -> None:
        """Refuse poses for a model that does not learn from them, and a loss of classes alone for one that does."""
        model: Any = find_experiment(experiment.experiment)[1].model
        if not _learns_from_poses(model):
            require(getattr(experiment.data, "poses", None) is None, "data.poses", "a folder", "null but for PI-ViT")
            return
        q = experiment.training.generalised_cross_entropy
        require(not q, "training.generalised_cross_entropy", q, "0 for PI-ViT, whose loss is not of classes alone")

    def open_data(self, data: Any, folder: RunFolder, *, rank: int = 0, world_size: int = 1) -> DataSet:
        """Open the videos, which have to have the classes of the run."""
        opened: Any = self.build_data(data, rank=rank, world_size=world_size)
        if folder.classes.exists() and tuple(opened.class_names) != read_classes(folder):
            raise ValueError(sentence("data.path", "videos of other classes", f"those in {folder.classes}"))
        return opened

    def sizes(self, data: Any, opened: Any) -> VideoSizes:
        """Return the classes and the size of a segment."""
        return VideoSizes(opened.output_size, data.n_frames, data.image_size)

    def sizes_of_run(self, run: Any) -> VideoSizes:
        """Count the run's classes."""
        data = run.experiment.data
        return VideoSizes(len(run.class_names), data.n_frames, data.image_size)

    def load_initial_weights(self, model: nn.Module, path: str, data: DataSet | None = None) -> str:
        """Load the weights of a run, of the published TimeSformer or of Hugging Face's port of it."""
        return start_from(model, path)  # type: ignore[arg-type]

    def check_extras(self, opened: VideoData) -> None:
        """Refuse names of classes that cannot be lines of a file."""
        bad = next((name for name in opened.class_names if not _can_be_listed(name)), None)
        if bad is not None:
            raise ValueError(sentence("the name of a class", repr(bad), "letters, and no control characters"))

    def save_extras(self, opened: VideoData, folder: RunFolder) -> None:
        """Write the names of the classes, one per line."""
        with replacing(folder.classes) as file:
            file.write("".join(f"{name}\n" for name in opened.class_names).encode())

    def class_names(self, run: Any) -> tuple[str, ...]:
        """Load the names from the run's folder, or from the videos if it has none."""
        return read_classes(run.folder) if run.folder.classes.exists() else tuple(run.data.class_names)

    def score(self, run: Any, split: Any, temperature: float | None) -> dict[str, Any]:
        """Score all views of every video of a split."""
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
            "n_videos": scores.n_examples,
            "n_videos_left_out": len(data.videos(split)) - scores.n_examples,
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
        """Refuse: the scores of views are averaged as they are."""
        raise ValueError(sentence("the run", "over videos", "one over tokens"))

    def figures_of_scores(self, run: Any, split: str, scores: Mapping[str, Any]) -> list[Path]:
        """Draw the confusion matrix."""
        from recurra.analysis.plots import confusion_matrix, save  # loads matplotlib

        name = run.score_file(split).stem.replace("eval", "confusion", 1)
        figure = confusion_matrix(torch.tensor(scores["confusion"]), list(scores["class_accuracies"]))
        return save(figure, run.folder.figures, name)


@register_task("motions")
class MotionsTask(VideoTask):
    """The generated motions, which are written on first use."""

    data = MotionsConfig

    def models(self) -> list[ModelEntry]:
        """List the models of videos that learn from no poses."""
        return [entry for entry in super().models() if not _learns_from_poses(entry.model)]


def read_classes(folder: RunFolder) -> tuple[str, ...]:
    """Read the names of the classes in a video run's folder, in their order.

    Raises:
        OSError: it has none.
        ValueError: the file is damaged.
    """
    names = tuple(read_text(folder.classes).removesuffix("\n").split("\n"))
    if len(set(names)) < len(names) or not all(map(_can_be_listed, names)):
        raise ValueError(sentence(str(folder.classes), "damaged", "the distinct names of the classes, one per line"))
    return names


def _learns_from_poses(model: type[nn.Module]) -> bool:
    return bool(getattr(model, "learns_from_poses", False))


def _can_be_listed(name: str) -> bool:
    """Whether a class of this name can be a line of a file: it has letters, and no control characters."""
    return bool(name.strip()) and not any(unicodedata.category(letter) == "Cc" for letter in name)
