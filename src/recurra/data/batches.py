"""What a data set is: batches, numbered by epoch and step.

A batch is a pure function of (seed, epoch, step, rank). Reading one changes nothing in its source, so a run can resume
from (epoch, step) alone, and two runs can read the same source.
"""

from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from recurra.layers.poses import Poses

Split: TypeAlias = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

IGNORED_TARGET = -100
"""The target of a position that does not count in the loss or in a metric (torch's default `ignore_index`)."""


class Batch(NamedTuple):
    """The sequences of one step and their targets.

    inputs: (B, L) int64, always inside the vocabulary. For video: clips (B, T, C, H, W) of normalised frames, float32.
    targets: (B, L) int64; `IGNORED_TARGET` at positions that do not count. For video: (B, S), for the S segments of a
        clip.
    continues: True if sequence b continues sequence b of the previous batch, so that the state is carried over; False
        if every sequence starts a stream (state None), as in the first batch of an epoch.
    poses: of the persons in clips, for models that learn from them; None without.
    cu_seqlens: the borders of documents that are packed end to end, inputs then (1, T); None for sequences of one
        length.
    """

    inputs: Tensor
    targets: Tensor
    continues: bool
    poses: Poses | None = None
    cu_seqlens: Tensor | None = None

    @property
    def n_steps(self) -> int:
        """How many steps the batch has: the tokens, or frames, of all its sequences."""
        return self.inputs.shape[0] * self.inputs.shape[1]


@runtime_checkable
class BatchSource(Protocol):
    """The batches of one split, as one rank reads them."""

    batch_size: int
    """Sequences in a full batch on this rank; the last batch of an epoch may have fewer."""

    def __len__(self) -> int:
        """Count the steps in an epoch, the same on every rank."""
        ...

    def batch(self, epoch: int, step: int) -> Batch:
        """Return the batch of a step: a pure function of (seed, epoch, step, rank).

        Raises IndexError for a step outside 0..len-1, and ValueError for a negative epoch.
        """
        ...


@runtime_checkable
class LevelledSource(BatchSource, Protocol):
    """Training batches in levels, of which the next one begins once this one is learned."""

    n_levels: int
    """Levels above the first one, which is 0."""
    level_loss: float
    """The mean training loss of an epoch, in nats per target, below which a level is learned."""

    def at_level(self, level: int) -> BatchSource:
        """Return the batches of a level, as many in an epoch as at every other. Raises ValueError outside
        0..n_levels."""
        ...


@runtime_checkable
class DataSet(Protocol):
    """Up to three splits, and the number of values that a target may take."""

    output_size: int
    """How many values a target may take."""

    def source(self, split: Split) -> BatchSource:
        """Return the batches of a split. Raises ValueError for a split that the data set does not have."""
        ...


@runtime_checkable
class TokenDataSet(DataSet, Protocol):
    """A data set whose inputs are tokens: whole numbers below `vocab_size`."""

    vocab_size: int
    """How many values an input may take."""
