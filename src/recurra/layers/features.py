"""Positive random features relative to running maxima, so that none of their exponentials overflows."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recurra.lengths import mask_fill
from recurra.ops._operator import Differentiable, addresses, numba_kernels_take, require_layouts
from recurra.ops.scan.reference import running_maximum

LOWEST = -1e30
"""The running maximum before the first step; finite, so that no difference is NaN."""


class _PositiveFeatures(NamedTuple):
    """What enters a linear attention; only `queries` and `keys` have gradients."""

    queries: Float[Tensor, "B L H m"]  # exp(q_r + peak_r) / the largest of a head: a factor that normalising cancels
    keys: Float[Tensor, "B L H m"]  # exp(e_r - peak_r) with the exponents e_r = k_r - less; 0 at padding
    decay: Float[Tensor, "B L H m"]  # exp(peak before - peak), by which the sums are multiplied
    peak: Float[Tensor, "B H m"]  # the largest exponents up to the last step


def positive_features(
    q: Float[Tensor, "B L H m"],
    k: Float[Tensor, "B L H m"],
    less: Float[Tensor, "B L H"],
    start: Float[Tensor, "B H m"],
    mask: Bool[Tensor, "B L"] | None = None,
) -> _PositiveFeatures:
    """Compute the features of queries and keys, relative to the largest exponents of the keys so far.

    q and k are w_r q and w_r k of at least one step, `less` is |k|^2 / 2, and `start` has the largest exponents before
    the first step, or `LOWEST`, without a gradient. On a CPU a kernel makes all of them in one walk over time. It is
    the reference itself for a padded batch, a single step and other types and devices, and under torch.compile,
    torch.func and forward derivatives.
    """
    batch, length, heads, size = q.shape
    of_start = start, (batch, heads, size)
    require_layouts(q.dtype, q.device, k=(k, q.shape), less=(less, (batch, length, heads)), start=of_start)
    if mask is not None or length == 1 or not numba_kernels_take(q):
        return _positive_features_reference(q, k, less, start, mask)
    return _PositiveFeatures(*_positive_features(q, k, less, start))


def _positive_features_reference(
    q: Tensor, k: Tensor, less: Tensor, start: Tensor, mask: Tensor | None = None
) -> _PositiveFeatures:
    """Compute the same in plain operators."""
    exponents, start = k - less[..., None], start.detach()[:, None]
    if mask is not None:
        exponents = exponents.masked_fill(~mask[..., None, None], LOWEST)
    peaks = torch.maximum(running_maximum(exponents.detach()), start)
    decay = torch.exp(torch.cat([start, peaks], 1)[:, :-1] - peaks)
    keys = mask_fill(torch.exp(exponents - peaks), mask, 0)
    scores = q + peaks
    queries = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
    return _PositiveFeatures(queries, keys, decay, peaks[:, -1].clone())


def _forward(keep: bool, q: Tensor, k: Tensor, less: Tensor, start: Tensor) -> tuple[tuple, tuple]:
    from recurra.layers._cpu import walk_features

    dense = [x.detach().contiguous() for x in (q, k, less)]
    peak = start.detach().clone(memory_format=torch.contiguous_format)
    queries, keys, decay = (torch.empty_like(dense[0]) for _ in range(3))
    places = addresses(*dense, peak, queries, keys, decay)
    walk_features(*places, *q.shape, jobs=q.shape[0] * q.shape[2], work=3 * q.numel())
    return (queries, keys, decay, peak), (q, k, less, start, queries, keys)


def _backward(gradients: tuple, saved: tuple, needs: tuple) -> tuple[Tensor | None, ...]:
    (d_queries, d_keys, *_), (*_, queries, keys) = gradients, saved
    d_q = None if d_queries is None else d_queries * queries
    d_k = None if d_keys is None else d_keys * keys
    return d_q, d_k, None if d_k is None else -d_k.sum(-1), None


_positive_features = Differentiable(
    _forward, _backward, n_inputs=4, reference=_positive_features_reference, constant=(2, 3)
)
