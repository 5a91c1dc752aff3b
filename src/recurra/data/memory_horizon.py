"""The Memory Horizon task (GateLoop section 5.1, GateLoop App. A): sequences, targets, memory spans.

A sequence has number tokens 0..largest and, at random places, a reset token. At each step the model must output a
compressed value of all numbers since the last reset, so it has to remember everything until a reset, and then forget.
"""

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor

from recurra.checks import kind_of, require_at_least, sentence
from recurra.data.order import MEMORY_HORIZON_TOKENS, random_generator

# Segments of similar length are computed together. 128 segments of 1,024 numbers in 16 bits fill 256 KiB, which stays
# in the cache of a core during the passes over them.
_SEGMENTS_AT_ONCE = 128


def memory_horizon_targets(
    tokens: Integer[Tensor, "N L"], *, reset_token: int = 5, modulus: int = 51
) -> Int[Tensor, "N L"]:
    """Compute the target of every step (GateLoop App. A).

    Let x_0 .. x_{s-1} be the number tokens after the last reset (or from the start, if there was none), up to and
    including the step:

        target = (x_0 x_{s-1} - x_1 x_{s-2} + x_2 x_{s-3} - ...) mod modulus

    If s is odd, the middle number stands alone and takes the next sign. At a reset the list is empty and the target is
    0, which the paper leaves open. The remainder is never negative.

    tokens: (N, L) whole numbers, none negative; every token except `reset_token` is a number. Returns (N, L) int64 on
    the device of `tokens`. The work grows with the sum of the squared segment lengths.

    >>> memory_horizon_targets(torch.tensor([[2, 3, 4, 5, 1]])).tolist()   # 2; 2*3; 2*4 - 3; reset; 1
    [[2, 6, 5, 0, 1]]
    >>> memory_horizon_targets(torch.tensor([[2, 3, 4, 1]])).tolist()      # the last: 2*1 - 3*4 = -10
    [[2, 6, 5, 41]]

    Raises TypeError for tokens that are not whole numbers; ValueError for a shape other than (N, L), for negative
    tokens and for a modulus below 1.
    """
    _require_tokens(tokens)
    require_at_least(1, modulus=modulus)
    values = tokens.detach().cpu().numpy().astype(np.int64)
    if values.size:
        require_at_least(0, **{"the smallest of tokens": int(values.min())})
    starts, lengths = _segments(values == reset_token)

    # x and x mod modulus give the same target; smaller numbers let the sums below use a narrower type.
    largest_term = min(int(values.max(initial=0)), modulus - 1) ** 2
    longest = int(lengths.max(initial=0))
    number_type = np.min_scalar_type(-2 * (largest_term + modulus) * (longest // 2 + 1))
    numbers = (values.reshape(-1) % modulus).astype(number_type)

    targets = np.zeros(values.size, dtype=np.int64)
    by_length = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    for first in range(0, len(by_length), _SEGMENTS_AT_ONCE):
        group = by_length[first : first + _SEGMENTS_AT_ONCE]
        columns = np.arange(lengths[group[0]])
        inside = columns < lengths[group, None]
        places = np.where(inside, starts[group, None] + columns, 0)
        sums = _alternating_products(np.where(inside, numbers[places], 0))
        targets[places[inside]] = sums[inside] % modulus
    return torch.from_numpy(targets.reshape(values.shape)).to(tokens.device)


def memory_spans(tokens: Integer[Tensor, "N L"], *, reset_token: int = 5) -> Int[Tensor, "N L"]:
    """Count the numbers that the target of each step depends on: the steps since the last reset, 0 at a reset.

    tokens: (N, L) whole numbers. Returns (N, L) int64 on the same device.

    >>> memory_spans(torch.tensor([[2, 3, 4, 5, 1]])).tolist()
    [[1, 2, 3, 0, 1]]

    Raises TypeError for tokens that are not whole numbers, ValueError for a shape other than (N, L).
    """
    _require_tokens(tokens)
    step = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    if tokens.numel() == 0:
        return step.clone()
    last_reset = torch.where(tokens == reset_token, step, -1).cummax(dim=1).values
    return step - last_reset


def draw_memory_horizon_tokens(
    n_samples: int, sequence_length: int, *, largest_number: int, resets_per_sample: int, seed: int
) -> Int[Tensor, "N L"]:
    """Draw random sequences: numbers uniform in 0..largest_number, and resets at distinct uniform places.

    The reset token is largest_number + 1. Every sequence has `resets_per_sample` of them, at any step, including the
    first. Returns (n_samples, sequence_length) int64; the same seed gives the same sequences.
    """
    random = random_generator(seed, MEMORY_HORIZON_TOKENS)
    tokens = random.integers(0, largest_number + 1, size=(n_samples, sequence_length), dtype=np.int64)
    # Floyd's sampling, one draw for all sequences: the i-th draw is uniform over 0..last; if that place is already
    # taken, it takes the place `last` instead, which no earlier draw could reach.
    places = np.full((n_samples, resets_per_sample), -1, dtype=np.int64)
    for i in range(resets_per_sample):
        last = sequence_length - resets_per_sample + i
        drawn = random.integers(0, last + 1, size=n_samples, dtype=np.int64)
        taken = (places == drawn[:, None]).any(axis=1)
        places[:, i] = np.where(taken, last, drawn)
    np.put_along_axis(tokens, places, largest_number + 1, axis=1)
    return torch.from_numpy(tokens)


def _require_tokens(tokens: Tensor) -> None:
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(sentence("tokens", kind_of(tokens), "whole numbers"))
    if tokens.ndim != 2:
        raise ValueError(sentence("tokens", kind_of(tokens), "the shape (N, L)"))


def _segments(is_reset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the segments between resets in the flattened (N, L) array: their starts and lengths, which may be 0."""
    n, length = is_reset.shape
    resets = np.flatnonzero(is_reset)
    first_steps = np.arange(n) * length
    starts = np.sort(np.concatenate([first_steps, resets + 1]))
    ends = np.sort(np.concatenate([first_steps + length, resets]))
    return starts, ends - starts


def _alternating_products(x: np.ndarray) -> np.ndarray:
    """Compute sums[r, t] = sum_i (-1)^i x[r, i] x[r, t - i] over i < t - i, plus the middle number alone if t = 2 i.

    x: (R, W), zero behind the end of a segment. Pair i enters every step t > 2 i, so it is one product of a column with
    a slice, for all segments and steps at once.
    """
    width = x.shape[1]
    sums = np.zeros_like(x)
    product = np.empty_like(x)
    for i in range((width + 1) // 2):
        accumulate = np.subtract if i % 2 else np.add
        steps = sums[:, 2 * i + 1 :]
        terms = product[:, : steps.shape[1]]
        np.multiply(x[:, i, None], x[:, i + 1 : width - i], out=terms)
        accumulate(steps, terms, out=steps)
        accumulate(sums[:, 2 * i], x[:, i], out=sums[:, 2 * i])
    return sums
