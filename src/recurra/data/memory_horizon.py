"""The Memory Horizon task (GateLoop section 5.1, GateLoop App. A): sequences, targets, memory spans.

A sequence has number tokens 0..largest and, at random places, a reset token. At each step the model must output a
compressed value of all numbers since the last reset, so it has to remember everything until a reset, and then forget.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor

from recurra.checks import choose, fields_of, kind_of, require, require_at_least, require_whole_number, sentence
from recurra.data.batches import (
    IGNORED_TARGET,
    MEMORY_HORIZON_TOKENS,
    MEMORY_HORIZON_WINDOWS,
    Batch,
    SampleOrder,
    Split,
    random_generator,
    require_rank,
)

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

    tokens: (N, L) whole numbers, none negative; every token except `reset_token` is a number. Returns (N, L) int64.

    >>> memory_horizon_targets(torch.tensor([[2, 3, 4, 5, 1]])).tolist()   # 2; 2*3; 2*4 - 3; reset; 1
    [[2, 6, 5, 0, 1]]
    >>> memory_horizon_targets(torch.tensor([[2, 3, 4, 1]])).tolist()      # the last: 2*1 - 3*4 = -10
    [[2, 6, 5, 41]]
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
    """
    _require_tokens(tokens)
    step = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    if tokens.numel() == 0:
        return step.clone()
    last_reset = torch.where(tokens == reset_token, step, -1).cummax(dim=1).values
    return step - last_reset


def _draw_memory_horizon_tokens(
    n_samples: int, sequence_length: int, *, largest_number: int, resets_per_sample: int, seed: int
) -> Int[Tensor, "N L"]:
    """Draw random sequences: numbers uniform in 0..largest_number, and resets at distinct uniform places."""
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
    """Compute sums[r, t] = sum_i (-1)^i x[r, i] x[r, t - i] over i < t - i, plus the middle number alone if t = 2 i."""
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


@dataclass(frozen=True)
class MemoryHorizonConfig:
    """The Memory Horizon data set (GateLoop Table 2); the defaults are the paper's."""

    sequence_length: int = 1024
    """Steps in a sequence."""
    largest_number: int = 4
    """Number tokens are 0..largest_number; the reset token is the number after them."""
    resets_per_sample: int = 3
    """Reset tokens in each sequence, at distinct random steps."""
    modulus: int = 51
    """Targets are taken modulo this number: they lie in 0..modulus-1."""
    n_samples: int = 2000
    """Sequences in total: a tenth each, rounded down, for validation and test, and the rest for training."""
    batch_size: int = 32
    """Sequences in a training step, over all ranks together."""
    eval_batch_size: int = 32
    """Sequences in an evaluation step, over all ranks together."""
    window_lengths: list[int] = field(default_factory=list)
    """Lengths of the windows that training reads first, instead of whole sequences, one phase after another."""
    window_epochs: list[int] = field(default_factory=list)
    """Epochs of each of these phases; whole sequences follow."""
    window_tokens: int = 512
    """Tokens of each sequence that a training step reads in windows."""
    seed: int = 0
    """Seed of the sequences, of the training order and of the windows' positions."""

    def __post_init__(self) -> None:
        sizes = ("sequence_length", "modulus", "batch_size", "eval_batch_size", "window_tokens")
        require_whole_number(1, **fields_of(self, "data", *sizes))
        require_whole_number(0, **fields_of(self, "data", "largest_number", "resets_per_sample", "seed"))
        require_whole_number(10, **fields_of(self, "data", "n_samples"))
        most = f"data.sequence_length = {self.sequence_length}"
        usual, n_phases = type(self).window_tokens, len(self.window_lengths)
        for number, length in enumerate(self.window_lengths):
            require(1 <= length <= self.sequence_length, f"data.window_lengths[{number}]", length, f"1 to {most}")
        rules = (
            (self.resets_per_sample <= self.sequence_length, "resets_per_sample", f"at most {most}"),
            (n_phases > 0 or self.window_tokens == usual, "window_tokens", f"{usual} without data.window_lengths"),
            (n_phases == len(self.window_epochs), "window_epochs", f"as many as data.window_lengths, {n_phases}"),
            (min(self.window_epochs, default=1) >= 1, "window_epochs", "numbers of at least 1"),
        )
        for holds, name, expected in rules:
            require(holds, f"data.{name}", getattr(self, name), expected)

    def build(self, *, rank: int = 0, world_size: int = 1) -> "MemoryHorizon":
        """Draw the sequences and compute their targets, the same on every rank."""
        return MemoryHorizon(self, rank=rank, world_size=world_size)


class MemoryHorizon:
    """The sequences of a `MemoryHorizonConfig`.

    tokens, targets: (n_samples, sequence_length) int64; training first, then validation, then test.
    reset_token: largest_number + 1.
    """

    def __init__(self, config: MemoryHorizonConfig, *, rank: int = 0, world_size: int = 1) -> None:
        require_rank(rank, world_size, config.batch_size)
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.reset_token = config.largest_number + 1
        self.vocab_size = config.largest_number + 2
        self.output_size = config.modulus
        self.tokens: Int[Tensor, "N L"] = _draw_memory_horizon_tokens(
            config.n_samples,
            config.sequence_length,
            largest_number=config.largest_number,
            resets_per_sample=config.resets_per_sample,
            seed=config.seed,
        )
        self.targets: Int[Tensor, "N L"] = memory_horizon_targets(
            self.tokens, reset_token=self.reset_token, modulus=config.modulus
        )

    def places(self, split: Split) -> slice:
        """Return the place of a split in `tokens` and `targets`. Raises ValueError for an unknown split."""
        tenth = self.config.n_samples // 10
        end_of_training = self.config.n_samples - 2 * tenth
        places = {
            "train": slice(0, end_of_training),
            "valid": slice(end_of_training, end_of_training + tenth),
            "test": slice(end_of_training + tenth, self.config.n_samples),
        }
        return choose("split", places, split)

    def spans(self, split: Split) -> Int[Tensor, "N L"]:
        """Return the memory span of each step of each sequence of a split (see `memory_spans`)."""
        return memory_spans(self.tokens[self.places(split)], reset_token=self.reset_token)

    def source(self, split: Split) -> "_SampleSource":
        """Return the batches of a split: training in a new order each epoch, validation and test in a fixed order."""
        places, config = self.places(split), self.config
        training = split == "train"
        batch_size, seed = (config.batch_size, config.seed) if training else (config.eval_batch_size, None)
        options: dict[str, Any] = {"batch_size": batch_size, "seed": seed}
        options |= {"rank": self.rank, "world_size": self.world_size}
        if training and config.window_lengths:
            return _WindowSource(self, self.tokens[places], self.targets[places], **options)
        return _SampleSource(self.tokens[places], self.targets[places], **options)


class _SampleSource:
    """Batches of independent sequences, each of which starts from state None, in the order of `SampleOrder`."""

    def __init__(
        self, tokens: Tensor, targets: Tensor, *, batch_size: int, seed: int | None, rank: int = 0, world_size: int = 1
    ) -> None:
        self._tokens = tokens
        self._targets = targets
        self._order = SampleOrder(len(tokens), batch_size=batch_size, seed=seed, rank=rank, world_size=world_size)
        self.batch_size = self._order.batch_size

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, epoch: int, step: int) -> Batch:
        places, n_counted = self._order.samples(epoch, step)
        targets = self._targets[places]
        targets[n_counted:] = IGNORED_TARGET
        return Batch(self._tokens[places], targets, continues=False)


class _WindowSource(_SampleSource):
    """Training on windows at random places of the samples, in phases: short ones first, whole sequences last."""

    def __init__(self, data: MemoryHorizon, tokens: Tensor, targets: Tensor, **options: Any) -> None:
        super().__init__(tokens, targets, **options)
        self._data = data

    def length(self, epoch: int) -> int:
        for length, epochs in zip(self._data.config.window_lengths, self._data.config.window_epochs):
            if epoch < epochs:
                return length
            epoch -= epochs
        return self._tokens.shape[1]

    def batch(self, epoch: int, step: int) -> Batch:
        length, whole, data = self.length(epoch), self._tokens.shape[1], self._data
        if length == whole:
            return super().batch(epoch, step)
        samples, _ = self._order.samples(epoch, step)
        rows = torch.tensor(samples).repeat_interleave(max(1, data.config.window_tokens // length))
        random = random_generator(data.config.seed, MEMORY_HORIZON_WINDOWS, epoch, step, 0)
        drawn = random.integers(0, whole - length + 1, (data.world_size, len(rows)), dtype=np.int64)
        starts = torch.from_numpy(drawn[data.rank])
        windows = self._tokens[rows[:, None], starts[:, None] + torch.arange(length)]
        targets = memory_horizon_targets(windows, reset_token=data.reset_token, modulus=data.config.modulus)
        return Batch(windows, targets, continues=False)


class SpanAccuracy(NamedTuple):
    """How many positions are correct, and how many there are, at each memory span 0, 1, 2, ...; on the CPU."""

    n_correct: Int[Tensor, " spans"]
    counts: Int[Tensor, " spans"]

    @property
    def overall(self) -> float:
        """The share of correct positions overall; NaN if there are no positions."""
        total = int(self.counts.sum())
        return int(self.n_correct.sum()) / total if total else float("nan")
