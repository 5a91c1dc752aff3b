"""Accuracy as a function of how much has to be remembered (GateLoop, section 5.1 and Figure 7).

Whole numbers are kept and divided at the end: results are exact and can be pooled over neighbouring spans.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor


class SpanAccuracy(NamedTuple):
    """How many positions were right, by memory span; on the CPU.

    edges: (bins + 1,) int64, increasing: bin i holds the spans with edges[i] <= span < edges[i + 1].
    n_correct: (bins,) int64, positions that were right.
    counts: (bins,) int64, positions there are.
    """

    edges: Int[Tensor, " bins+1"]
    n_correct: Int[Tensor, " bins"]
    counts: Int[Tensor, " bins"]

    @property
    def accuracies(self) -> Float[Tensor, " bins"]:
        """The share that was right in each bin, float64 in [0, 1]; NaN for a bin without positions."""
        return self.n_correct.double() / self.counts.double()

    @property
    def overall(self) -> float:
        """The share that was right over all positions; NaN where there are none."""
        total = int(self.counts.sum())
        return int(self.n_correct.sum()) / total if total else float("nan")


def accuracy_by_span(
    correct: Shaped[Tensor, "..."], spans: Shaped[Tensor, "..."], *, edges: Sequence[int] | None = None
) -> SpanAccuracy:
    """Count the right positions by memory span.

    Args:
        correct: bool, any shape: whether the prediction at a position was right. Positions without a target
            are left out by the caller.
        spans: integers of the same shape: how many tokens the target at a position depends on.
        edges: increasing whole numbers; bin i holds edges[i] <= span < edges[i + 1]. They must cover every
            span: a position that falls outside would be lost without a word. None gives each span from 0 to
            the largest its own bin.

    Raises:
        TypeError: correct is not bool, or spans or edges are not whole numbers.
        ValueError: the shapes differ, a span is negative or outside the edges, or the edges do not increase.
    """
    _check(correct, spans)
    flat = spans.reshape(-1).long()
    smallest, largest = (int(flat.min()), int(flat.max())) if flat.numel() else (0, 0)
    if smallest < 0:
        raise ValueError(f"spans must not be negative, got {smallest}: a span is a number of tokens")
    borders = _borders(range(largest + 2) if edges is None else edges)
    first, last = int(borders[0]), int(borders[-1])
    if flat.numel() and not first <= smallest <= largest < last:
        raise ValueError(
            f"edges must cover every span: they hold {first}..{last - 1}, the spans are "
            f"{smallest}..{largest}; widen the edges, or leave the positions outside of them out"
        )
    bins = torch.bucketize(flat, borders.to(flat.device), right=True) - 1
    n_bins = len(borders) - 1
    return SpanAccuracy(
        edges=borders,
        n_correct=torch.bincount(bins[correct.reshape(-1)], minlength=n_bins).cpu(),
        counts=torch.bincount(bins, minlength=n_bins).cpu(),
    )


def _check(correct: Tensor, spans: Tensor) -> None:
    if correct.dtype != torch.bool:
        raise TypeError(f"correct must be a bool tensor (prediction == target), got {correct.dtype}")
    if spans.dtype == torch.bool or spans.is_floating_point() or spans.is_complex():
        raise TypeError(f"spans must be a tensor of whole numbers, got {spans.dtype}")
    if correct.shape != spans.shape:
        raise ValueError(f"correct and spans must have one shape, got {tuple(correct.shape)} and {tuple(spans.shape)}")


def _borders(edges: Sequence[int]) -> Int[Tensor, " edges"]:
    borders = torch.as_tensor(list(edges))
    if borders.ndim != 1 or len(borders) < 2:
        raise ValueError(f"edges must be a flat list of two or more, got {list(edges)}")
    if borders.dtype == torch.bool or borders.is_floating_point() or borders.is_complex():
        raise TypeError(f"edges must be whole numbers, got {list(edges)}")
    if bool((borders.diff() <= 0).any()):
        raise ValueError(f"edges must increase, got {list(edges)}")
    return borders.long()
