"""Batches that are drawn when they are read: no two steps of a run see the same sequences."""

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch

from recurra.checks import require
from recurra.data.batches import IGNORED_TARGET, SPLITS, Batch, Split
from recurra.data.order import TASKS, random_generator, require_step

Draw = Callable[[np.random.Generator, int, int], tuple[np.ndarray, np.ndarray]]
"""Called with the source of chance, the number of sequences and their length; returns tokens (B, L), and either targets
(B, L), -1 where none is, or one target (B,) for the last token."""

PACES = ("linear", "geometric")
"""How the longest length may grow."""


class Lengths(NamedTuple):
    """The lengths of sequences: drawn from `shortest` to a longest that grows from `longest` to `final`.

    growth: the epochs in which it grows, after `hold` epochs in which it does not. pace: one of `PACES`, by the same
    number of tokens in every epoch or by the same factor.
    """

    shortest: int
    longest: int
    final: int
    growth: int
    pace: str = "linear"
    hold: int = 0

    def range(self, place: float) -> tuple[int, int]:
        """Return the shortest and the longest length at a place in training, counted in epochs."""
        share = min(1.0, max(0.0, place - self.hold) / self.growth) if self.growth else 1.0
        if self.pace == "geometric":
            longest = self.longest * (self.final / self.longest) ** share
        else:
            longest = self.longest + share * (self.final - self.longest)
        return self.shortest, int(longest + 1e-9)  # the tolerance keeps a length that is reached exactly


class DrawnSource:
    """Batches of independent sequences, drawn anew for every step of every epoch; all of a batch have one length.

    What a step reads depends on (seed, split, epoch, step) alone. Sequences are dealt to the ranks in order.

    In pieces, sequences of one length are read over several steps, which continue one another.

    draw: makes them. lengths: theirs. n_batches: batches of whole sequences in an epoch. batch_size: sequences in a
    step over all ranks together; the attribute of the same name counts those on this rank. piece: tokens that a step
    reads of each sequence; None for all. Then `lengths` must allow one length only.
    """

    def __init__(
        self,
        draw: Draw,
        lengths: Lengths,
        *,
        split: Split,
        n_batches: int,
        batch_size: int,
        seed: int,
        piece: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.batch_size = -(-batch_size // world_size)
        self._draw, self._lengths, self._n_batches = draw, lengths, n_batches
        self._n_pieces = 1 if piece is None else -(-lengths.longest // piece)
        self._piece = piece
        self._place = (TASKS, SPLITS.index(split))
        self._all_ranks, self._seed, self._rank = batch_size, seed, rank

    def __len__(self) -> int:
        return self._n_batches * self._n_pieces

    def batch(self, epoch: int, step: int) -> Batch:
        """Draw the sequences of a step. Raises what `BatchSource.batch` raises."""
        require_step(len(self), epoch, step)
        number, place = divmod(step, self._n_pieces)
        inputs, targets = self._sequences(epoch, number)
        if self._piece is not None:
            read = slice(place * self._piece, (place + 1) * self._piece)
            inputs, targets = inputs[:, read], targets[:, read]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), continues=place > 0)

    def _sequences(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw a batch of whole sequences, and return those of this rank."""
        random = random_generator(self._seed, *self._place, epoch, number)
        shortest, longest = self._lengths.range(epoch + number / self._n_batches)
        tokens, drawn = self._draw(random, self._all_ranks, int(random.integers(shortest, longest + 1)))
        targets = np.full_like(tokens, IGNORED_TARGET)
        if drawn.ndim == 1:
            targets[:, -1] = drawn
        else:
            np.copyto(targets, drawn, where=drawn >= 0)
        mine = slice(self._rank * self.batch_size, (self._rank + 1) * self.batch_size)
        return tokens[mine], targets[mine]


class LevelledDrawnSource(DrawnSource):
    """Drawn batches whose longest length grows from level to level, and not with the epochs.

    draw, lengths, options: of `DrawnSource`; the epochs in which `lengths` would grow are the levels. level_loss: the
    mean training loss of an epoch, in nats per target, below which a level is learned.
    """

    def __init__(self, draw: Draw, lengths: Lengths, *, level_loss: float, **options: Any) -> None:
        super().__init__(draw, lengths, **options)
        self.n_levels, self.level_loss, self._growing = lengths.growth, level_loss, lengths
        self._lengths = self._at(0)

    def at_level(self, level: int) -> "LevelledDrawnSource":
        """Return the batches of a level. Raises ValueError outside 0..n_levels."""
        require(0 <= level <= self.n_levels, "level", level, f"0 to {self.n_levels}")
        source = copy(self)
        source._lengths = self._at(level)
        return source

    def _at(self, level: int) -> Lengths:
        shortest, longest = self._growing.range(float(level))
        return Lengths(shortest, longest, longest, 0)
