"""Scores of a classifier: mean class accuracy, top-1, top-5 and the confusion matrix.

The probabilities of all views of a video are averaged before scoring, as the TimeSformer and CR-ViT papers do (10 clips
along time, 3 crops of each). The prediction for a clip is that of its last segment, when the model has seen all of it.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.checks import require, sentence
from recurra.data.batches import IGNORED_TARGET
from recurra.models.shell import evaluation_mode
from recurra.video.data import ViewBatch

_TOP = 5
"""The number of guesses that the second score allows; datasets with no more classes than this have no such score."""


class _ClassScores(NamedTuple):
    """The confusion matrix and what follows from it, on the CPU."""

    confusion: Int[Tensor, "C C"]
    n_in_top_5: int | None

    @property
    def counts(self) -> Int[Tensor, " C"]:
        """The number of examples of each class."""
        return self.confusion.sum(1)

    @property
    def n_examples(self) -> int:
        """The number of examples."""
        return int(self.confusion.sum())

    @property
    def class_accuracies(self) -> Float[Tensor, " C"]:
        """The share of each class's examples that were predicted correctly, float64; NaN for an empty class."""
        return self.confusion.diagonal().double() / self.counts

    @property
    def mean_class_accuracy(self) -> float:
        """The mean accuracy of the classes that have examples: each class has the same weight."""
        return float(self.class_accuracies.nanmean())

    @property
    def top_1(self) -> float:
        """The share of examples that were predicted correctly."""
        return int(self.confusion.diagonal().sum()) / self.n_examples

    @property
    def top_5(self) -> float | None:
        """The share of examples whose class was among the five likeliest; None with five classes or fewer."""
        return None if self.n_in_top_5 is None else self.n_in_top_5 / self.n_examples


def class_scores(probabilities: Float[Tensor, "N C"], targets: Int[Tensor, " N"]) -> _ClassScores:
    """Count which class was predicted for which: the likeliest one, and the first of those that tie.

    Args:
        probabilities: of each class for each example; any values that rank the classes will do.
        targets: the true class of each example.
    """
    n_classes = probabilities.shape[1]
    require(len(targets) > 0, "targets", targets.tolist(), "at least one example to score")
    for target in (int(targets.min()), int(targets.max())):
        require(0 <= target < n_classes, "a target", target, f"a class from 0 to {n_classes - 1}")
    if bool(probabilities.isnan().any()):
        hint = "check that the model's weights and its input are finite"
        raise FloatingPointError(sentence("a probability", "NaN", "a number", hint))
    probabilities, targets = probabilities.cpu(), targets.cpu().long()  # for the product below
    pairs = targets * n_classes + probabilities.argmax(1)
    confusion = torch.bincount(pairs, minlength=n_classes**2).view(n_classes, n_classes)
    if n_classes <= _TOP:
        return _ClassScores(confusion, None)
    guesses = probabilities.argsort(dim=1, descending=True, stable=True)[:, :_TOP]
    return _ClassScores(confusion, int((guesses == targets[:, None]).any(1).sum()))


class _VideoProbabilities(NamedTuple):
    """A model's predictions for videos, on the CPU."""

    probabilities: Float[Tensor, "N C"]
    targets: Int[Tensor, " N"]
    videos: Int[Tensor, " N"]
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
        torch.tensor(videos),
        n_frames,
    )
