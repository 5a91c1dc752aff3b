"""Generated tasks: sequences that are drawn when they are read, so that no two steps of a run see the same ones.

A new one is a file: a function that draws, a `GeneratedConfig` with `make`, and a `GeneratedTask` that is registered.
"""

from abc import ABCMeta, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from recurra._choices import SPLITS, Split
from recurra.checks import fields_of, require, require_literal, require_literal_fields, require_whole_number
from recurra.data.batches import IGNORED_TARGET, TASKS, Batch, random_generator, require_rank, require_step
from recurra.train.evaluate import scaled_accuracy
from recurra.train.task import TokenTask

_Draw = Callable[[np.random.Generator, int, int], tuple[np.ndarray, np.ndarray]]
"""Called with the source of chance, the number of sequences and their length; returns tokens (B, L), and either targets
(B, L), -1 where none is, or one target (B,) for the last token."""


class _Lengths(NamedTuple):
    """The lengths of sequences: drawn from `shortest` to a longest that grows from `longest` to `final`."""

    shortest: int
    longest: int
    final: int
    growth: int
    pace: str = "linear"
    hold: int = 0

    def range(self, place: float) -> tuple[int, int]:
        share = min(1.0, max(0.0, place - self.hold) / self.growth) if self.growth else 1.0
        if self.pace == "geometric":
            longest = self.longest * (self.final / self.longest) ** share
        else:
            longest = self.longest + share * (self.final - self.longest)
        return self.shortest, int(longest + 1e-9)  # the tolerance keeps a length that is reached exactly


class _DrawnSource:
    """Batches of independent sequences, drawn anew for every step of every epoch; all of a batch have one length."""

    def __init__(
        self,
        draw: _Draw,
        lengths: _Lengths,
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
        require_step(len(self), epoch, step)
        number, place = divmod(step, self._n_pieces)
        random = random_generator(self._seed, *self._place, epoch, number)
        shortest, longest = self._lengths.range(epoch + number / self._n_batches)
        tokens, drawn = self._draw(random, self._all_ranks, int(random.integers(shortest, longest + 1)))
        targets = np.full_like(tokens, IGNORED_TARGET)
        if drawn.ndim == 1:
            targets[:, -1] = drawn
        else:
            np.copyto(targets, drawn, where=drawn >= 0)
        mine: tuple[slice, ...] = (slice(self._rank * self.batch_size, (self._rank + 1) * self.batch_size),)
        if self._piece is not None:
            mine += (slice(place * self._piece, (place + 1) * self._piece),)
        return Batch(torch.from_numpy(tokens[mine]), torch.from_numpy(targets[mine]), continues=place > 0)


class _LevelledDrawnSource(_DrawnSource):
    """Drawn batches whose longest length grows from level to level, and not with the epochs."""

    def __init__(self, draw: _Draw, lengths: _Lengths, *, level_loss: float, **options: Any) -> None:
        super().__init__(draw, lengths, **options)
        self.n_levels, self.level_loss, self._growing = lengths.growth, level_loss, lengths
        self._lengths = self._at(0)

    def at_level(self, level: int) -> "_LevelledDrawnSource":
        require(0 <= level <= self.n_levels, "level", level, f"0 to {self.n_levels}")
        source = copy(self)
        source._lengths = self._at(level)
        return source

    def _at(self, level: int) -> _Lengths:
        shortest, longest = self._growing.range(float(level))
        return _Lengths(shortest, longest, longest, 0)


class Sequences(NamedTuple):
    """How to draw the sequences of a task, and the numbers of its tokens, of its classes, and of those that answer."""

    draw: _Draw
    vocab_size: int
    output_size: int
    n_answers: int
    """Classes that are answers, all equally likely."""


@dataclass(frozen=True, kw_only=True)
class GeneratedConfig(metaclass=ABCMeta):  # no base ABC: recipes' help lists keys where all bases are dataclasses
    """What all tasks have in common: sequences are drawn, so an epoch is a number of batches."""

    shortest: ClassVar[int] = 1
    """The task's minimum length."""
    min_length: int
    """Shortest sequence in training, in tokens."""
    max_length: int
    """Longest sequence at the start of training."""
    final_length: int | None = None
    """Longest sequence after the curriculum; null: data.max_length throughout."""
    growth_epochs: int = 0
    """Epochs over which the longest length grows gradually from data.max_length to data.final_length."""
    hold_epochs: int = 0
    """Epochs before the longest length begins to grow."""
    growth: Literal["linear", "geometric"] = "linear"
    """linear: by the same number of tokens in every epoch; geometric: by the same factor. geometric trains longer on
    short sequences, which cost less and are learned first."""
    growth_loss: float | None = None
    """Increase the longest length by the next of its data.growth_epochs increments only after an epoch with a mean
    training loss, in nats per target, below this; null: one increment per epoch, regardless of the loss."""
    eval_min_length: int
    """Shortest sequence in evaluation."""
    eval_max_length: int
    """Longest sequence in evaluation."""
    steps_per_epoch: int = 500
    """Batches that make an epoch."""
    eval_steps: int = 16
    """Batches of whole sequences per evaluation, on validation and on test; they are always the same."""
    batch_size: int = 128
    """Sequences in a training step, over all ranks together; all have one length."""
    eval_batch_size: int = 128
    """Sequences in an evaluation step, over all ranks together."""
    eval_piece: int | None = None
    """Tokens of each sequence per evaluation step; the state is carried to the next step, so a long sequence needs the
    memory of one piece. Null: whole sequences. If set, all sequences have data.eval_max_length tokens."""
    seed: int = 0
    """Seed of the sequences."""

    def __post_init__(self) -> None:
        require_whole_number(self.shortest, **fields_of(self, "data", "min_length", "eval_min_length"))
        sizes = ("steps_per_epoch", "eval_steps", "batch_size", "eval_batch_size")
        require_whole_number(1, **fields_of(self, "data", *sizes))
        require_whole_number(0, **fields_of(self, "data", "growth_epochs", "hold_epochs", "seed"))
        require_whole_number(1, **fields_of(self, "data", "eval_piece"))
        require_whole_number(self.min_length, **fields_of(self, "data", "max_length"))
        require_whole_number(self.max_length, **fields_of(self, "data", "final_length"))
        require_whole_number(self.eval_min_length, **fields_of(self, "data", "eval_max_length"))
        grows = self.final_length is not None
        expected = "at least 1 with data.final_length" if grows else "0 without data.final_length"
        require(grows == (self.growth_epochs > 0), "data.growth_epochs", self.growth_epochs, expected)
        require(grows or not self.hold_epochs, "data.hold_epochs", self.hold_epochs, "0 without data.final_length")
        require_literal_fields(self, "data")
        require(grows or self.growth == "linear", "data.growth", self.growth, "linear without data.final_length")
        if (loss := self.growth_loss) is not None:
            require(loss > 0, "data.growth_loss", loss, "a positive number or null")
            require(grows, "data.growth_loss", loss, "null without data.final_length")
            require(not self.hold_epochs, "data.hold_epochs", self.hold_epochs, "0 with data.growth_loss")
        one_length = self.eval_piece is None or self.eval_min_length == self.eval_max_length
        expected = f"null, or data.eval_min_length = {self.eval_max_length}"
        require(one_length, "data.eval_piece", self.eval_piece, expected)

    @abstractmethod
    def make(self) -> Sequences:
        """Return how to draw the sequences."""

    def build(self, *, rank: int = 0, world_size: int = 1) -> "_GeneratedData":
        """Make the data set; nothing is drawn yet."""
        return _GeneratedData(self, rank=rank, world_size=world_size)


class _GeneratedData:
    """The sequences of a `GeneratedConfig`."""

    def __init__(self, config: GeneratedConfig, *, rank: int = 0, world_size: int = 1) -> None:
        require_rank(rank, world_size, config.batch_size)
        self.config, self.rank, self.world_size = config, rank, world_size
        self._draw, self.vocab_size, self.output_size, self.n_answers = config.make()

    def source(self, split: Split) -> _DrawnSource:
        """Return the batches of a split: in training by the curriculum, in evaluation the same ones every time."""
        require_literal(Split, split=split)
        config = self.config
        options: dict[str, Any] = {
            "split": split,
            "seed": config.seed,
            "rank": self.rank,
            "world_size": self.world_size,
        }
        if split != "train":
            lengths = _Lengths(config.eval_min_length, config.eval_max_length, config.eval_max_length, 0)
            options |= {"n_batches": config.eval_steps, "batch_size": config.eval_batch_size}
            return _DrawnSource(self._draw, lengths, piece=config.eval_piece, **options)
        final = config.max_length if config.final_length is None else config.final_length
        pace, hold = config.growth, config.hold_epochs
        lengths = _Lengths(config.min_length, config.max_length, final, config.growth_epochs, pace, hold)
        options |= {"n_batches": config.steps_per_epoch, "batch_size": config.batch_size}
        if config.growth_loss is None:
            return _DrawnSource(self._draw, lengths, **options)
        return _LevelledDrawnSource(self._draw, lengths, level_loss=config.growth_loss, **options)


class GeneratedTask(TokenTask):
    """Scored also by accuracy between chance, which is 0, and 1."""

    def score(self, run: Any, split: str, temperature: float | None, observe: Any = None) -> dict[str, Any]:
        measured = super().score(run, split, temperature, observe)
        if measured["accuracy"] is not None:
            measured["scaled_accuracy"] = scaled_accuracy(measured["accuracy"], run.data.n_answers)
        return measured
