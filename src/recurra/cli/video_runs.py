"""A run of a video model as the commands read it, without its videos."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from recurra.training import (
    CheckpointFolder,
    RunFolder,
    VideoExperiment,
    load_recipe,
    load_weights,
    scored_weights,
)


@dataclass
class VideoRun:
    """A trained video model, what it was trained with, and the names of its classes."""

    folder: RunFolder
    experiment: VideoExperiment
    model: nn.Module
    class_names: list[str]


def open_video_run(path: str, *, checkpoint: str = "best", overrides: Sequence[str] = ()) -> VideoRun:
    """Load a run without the videos that it was trained on.

    Args:
        path: the run's folder.
        checkpoint: best, last, previous or a file.
        overrides: values set over the run's config.yaml.

    Raises:
        FileNotFoundError: the folder holds no run, or none that wrote its classes down.
        CheckpointError: the checkpoint cannot be used.
        ValueError: the run is not over videos.
    """
    folder = RunFolder(path)
    folder.require_run()
    experiment = load_recipe(folder.config, overrides)
    if not isinstance(experiment, VideoExperiment):
        raise ValueError(f"{path} is a run of {experiment.experiment}; expected one over videos")
    names = folder.classes.read_text(encoding="utf-8").splitlines()
    file, saved = CheckpointFolder(folder.checkpoints).load(checkpoint)
    model = experiment.model.build(experiment.sizes_of(len(names)))
    load_weights(model, scored_weights(saved), file)
    return VideoRun(folder, experiment, model.eval(), names)
