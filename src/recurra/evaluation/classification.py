"""Scores of a classifier: mean class accuracy, top-1 and top-5, and who is taken for whom.

The probabilities of the views of one video are averaged before anything is counted (TimeSformer and CR-ViT are scored
so: 10 clips along time, 3 crops of each). The prediction for a clip is that of its last segment, for which the model
has seen all of it.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.data import IGNORED_TARGET
from recurra.data.video import ViewBatch
from recurra.evaluation.evaluate import evaluation_mode

TOP = 5
"""How many guesses the second score allows; it is left out where they would be all classes."""


class ClassScores(NamedTuple):
    """How often which class was predicted for which; on the CPU.

    confusion: how many examples of class i (row) were predicted as class j (column), int64.
    n_in_top_5: how many examples had their class among the five likeliest; None with five classes or fewer.
    """

    confusion: Int[Tensor, "C C"]
    n_in_top_5: int | None

    @property
    def counts(self) -> Int[Tensor, " C"]:
        """The examples of each class."""
        return self.confusion.sum(1)

    @property
    def n_examples(self) -> int:
        """All examples."""
        return int(self.confusion.sum())

    @property
    def class_accuracies(self) -> Float[Tensor, " C"]:
        """The share of each class's examples that was right, float64; NaN for a class without examples."""
        return self.confusion.diagonal().double() / self.counts

    @property
    def mean_class_accuracy(self) -> float:
        """The mean of the class accuracies over the classes that have examples: every class weighs the same."""
        return float(self.class_accuracies.nanmean())

    @property
    def top_1(self) -> float:
        """The share of all examples that was right."""
        return int(self.confusion.diagonal().sum()) / self.n_examples

    @property
    def top_5(self) -> float | None:
        """The share of all examples whose class was among the five likeliest; None with five classes or fewer."""
        return None if self.n_in_top_5 is None else self.n_in_top_5 / self.n_examples


def class_scores(probabilities: Float[Tensor, "N C"], targets: Int[Tensor, " N"]) -> ClassScores:
    """Count right and wrong predictions; the prediction is the likeliest class, of equal ones the first.

    Args:
        probabilities: of each class for each example; anything that ranks the classes will do.
        targets: the true class of each example.

    Raises:
        ValueError: there are no examples, or a target is no class.
        FloatingPointError: a probability is NaN.
    """
    n_classes = probabilities.shape[1]
    if not len(targets):
        raise ValueError("there are no examples to score")
    if int(targets.min()) < 0 or int(targets.max()) >= n_classes:
        raise ValueError(
            f"targets must be classes from 0 to {n_classes - 1}, got {int(targets.min())} to {int(targets.max())}"
        )
    if bool(probabilities.isnan().any()):
        raise FloatingPointError("a probability is NaN: the model or its input holds values that are not finite")
    probabilities, targets = probabilities.cpu(), targets.cpu()
    pairs = targets * n_classes + probabilities.argmax(1)
    confusion = torch.bincount(pairs, minlength=n_classes**2).view(n_classes, n_classes)
    if n_classes <= TOP:
        return ClassScores(confusion, None)
    guesses = probabilities.topk(TOP, dim=1).indices
    return ClassScores(confusion, int((guesses == targets[:, None]).any(1).sum()))


class VideoProbabilities(NamedTuple):
    """What a model says about videos, on the CPU.

    probabilities: the mean over a video's views of the softmax after its last segment, float64.
    targets: the class of each video.
    videos: the number of each video; those without a view that could be decoded are not there.
    n_frames: how many frames were read for all of them.
    """

    probabilities: Float[Tensor, "N C"]
    targets: Int[Tensor, " N"]
    videos: Int[Tensor, " N"]
    n_frames: int


def classify_videos(model: nn.Module, views: Iterable[ViewBatch]) -> VideoProbabilities:
    """Run a model over views of videos, each from a fresh state, without autocast and without gradients.

    Args:
        model: called as `model(clips, None) -> (logits, state)`, logits (B, S, C). It is in evaluation mode meanwhile.
        views: the views, in any order, in batches of any size. A row whose last target is `IGNORED_TARGET` does not
            count.

    Raises:
        ValueError: there is no view that counts.
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
            rows = zip(batch.videos.tolist(), batch.targets[:, -1].tolist(), logits.double().softmax(-1).cpu())
            for video, target, probabilities in rows:
                if target != IGNORED_TARGET:
                    totals[video] = totals[video] + probabilities if video in totals else probabilities
                    n_views[video] += 1
                    targets[video] = target
    if not totals:
        raise ValueError("there is no view to score: was no video there, or could none be decoded?")
    videos = sorted(totals)
    return VideoProbabilities(
        torch.stack([totals[video] / n_views[video] for video in videos]),
        torch.tensor([targets[video] for video in videos]),
        torch.tensor(videos),
        n_frames,
    )
