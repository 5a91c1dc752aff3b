"""Accuracy as a function of how much the model has to remember (GateLoop, section 5.1 and Figure 7).

Results are counts, divided only at the end, so they are exact and can be pooled over neighbouring spans.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from recurra.checks import kind_of, require, sentence
from recurra.data import IGNORED_TARGET, Batch


class SpanAccuracy(NamedTuple):
    """The number of correct predictions by memory span, on the CPU.

    edges: (bins + 1,) int64, increasing: bin i holds the spans with edges[i] <= span < edges[i + 1].
    n_correct: (bins,) int64, correct positions.
    counts: (bins,) int64, all positions.
    """

    edges: Int[Tensor, " bins+1"]
    n_correct: Int[Tensor, " bins"]
    counts: Int[Tensor, " bins"]

    @property
    def accuracies(self) -> Float[Tensor, " bins"]:
        """The share of correct positions in each bin, float64 in [0, 1]; NaN for an empty bin."""
        return self.n_correct.double() / self.counts.double()

    @property
    def overall(self) -> float:
        """The share of correct positions overall; NaN if there are no positions."""
        total = int(self.counts.sum())
        return int(self.n_correct.sum()) / total if total else float("nan")


def scaled_accuracy(accuracy: float, n_classes: int) -> float:
    """Return the accuracy with chance as 0 and no mistake as 1, as papers on state tracking report it.

    Args:
        accuracy: the share of correct predictions.
        n_classes: the values that a target may take, all equally likely; at least 2.
    """
    chance = 1.0 / n_classes
    return (accuracy - chance) / (1.0 - chance)


def accuracy_by_span(
    correct: Shaped[Tensor, "..."], spans: Shaped[Tensor, "..."], *, edges: Sequence[int] | None = None
) -> SpanAccuracy:
    """Count correct positions by memory span.

    Args:
        correct: bool, any shape: whether the prediction at a position is correct. Omit positions without a target.
        spans: integers of the same shape: how many tokens the target at a position depends on.
        edges: increasing integers; bin i holds edges[i] <= span < edges[i + 1]. They must cover every span, so that
            no position is lost silently. None gives each span from 0 to the largest a bin of its own.

    Raises:
        TypeError: `correct` is not bool, or `spans` or `edges` are not integers.
        ValueError: the shapes differ, a span is negative or outside the edges, or the edges do not increase.
    """
    _check(correct, spans)
    flat = spans.reshape(-1).long()
    smallest, largest = (int(flat.min()), int(flat.max())) if flat.numel() else (0, 0)
    require(smallest >= 0, "spans.min()", smallest, "at least 0", "a span is a number of tokens")
    borders = _borders(range(largest + 2) if edges is None else edges)
    require(
        not flat.numel() or int(borders[0]) <= smallest <= largest < int(borders[-1]),
        "edges",
        borders.tolist(),
        f"edges that cover the spans {smallest} to {largest}",
        "widen them, or omit the positions outside",
    )
    bins = torch.bucketize(flat, borders.to(flat.device), right=True) - 1
    n_bins = len(borders) - 1
    return SpanAccuracy(
        edges=borders,
        n_correct=torch.bincount(bins[correct.reshape(-1)], minlength=n_bins).cpu(),
        counts=torch.bincount(bins, minlength=n_bins).cpu(),
    )


class AroundResets:
    """Counts correct predictions before the first reset of each sequence, and from it on (GateLoop, section 5.1).

    Until then, a model only has to remember. What a model scores below that afterwards, it fails to forget. Called with
    each batch and its predictions, as `evaluate` calls its observer.

    reset_token: the token that resets.
    """

    def __init__(self, reset_token: int) -> None:
        self._reset_token = reset_token
        self._n_correct, self._counts = [0, 0], [0, 0]  # before, after

    def __call__(self, batch: Batch, predictions: Int[Tensor, "B L"]) -> None:
        """Count a batch of whole sequences."""
        after = (batch.inputs == self._reset_token).cumsum(1) > 0
        counted = batch.targets != IGNORED_TARGET
        for part, chosen in enumerate((counted & ~after, counted & after)):
            self._n_correct[part] += int((predictions == batch.targets)[chosen].sum())
            self._counts[part] += int(chosen.sum())

    @property
    def scores(self) -> dict[str, float]:
        """The shares of correct predictions, of those parts that have any positions."""
        names = ("accuracy_before_resets", "accuracy_after_resets")
        parts = zip(names, self._n_correct, self._counts)
        return {name: n_correct / count for name, n_correct, count in parts if count}


def _check(correct: Tensor, spans: Tensor) -> None:
    if correct.dtype != torch.bool:
        raise TypeError(sentence("correct", kind_of(correct), "a bool tensor", "pass prediction == target"))
    if not _holds_integers(spans):
        raise TypeError(sentence("spans", kind_of(spans), "a tensor of integers"))
    if correct.shape != spans.shape:
        raise ValueError(sentence("spans", kind_of(spans), f"the shape of correct, {tuple(correct.shape)}"))


def _borders(edges: Sequence[int]) -> Int[Tensor, " edges"]:
    borders = torch.as_tensor(list(edges))
    require(borders.ndim == 1 and len(borders) >= 2, "edges", list(edges), "a flat list of two or more integers")
    if not _holds_integers(borders):
        raise TypeError(sentence("edges", list(edges), "integers"))
    require(bool((borders.diff() > 0).all()), "edges", list(edges), "increasing integers")
    return borders.long()


def _holds_integers(tensor: Tensor) -> bool:
    return tensor.dtype != torch.bool and not tensor.is_floating_point() and not tensor.is_complex()
