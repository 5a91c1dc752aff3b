"""What a data set is: batches of whole numbers, numbered by epoch and step.

A batch is a pure function of (seed, epoch, step, rank). Nothing in a source moves when a batch is read, so
a run that resumes at (epoch, step) needs no other position, and two runs can read the same source.
"""

from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

Split: TypeAlias = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

IGNORED_TARGET = -100
"""The target of a position that counts neither in the loss nor in a metric (torch's own `ignore_index`)."""


class Batch(NamedTuple):
    """One step's input.

    inputs: (B, L) int64, always inside the vocabulary; of video, clips (B, T, C, H, W) of normalised frames, float32.
    targets: (B, L) int64; `IGNORED_TARGET` where nothing is asked; of video, (B, S) for the S segments of a clip.
    continues: True when row b goes on where row b of the previous step's batch ended, so that the state is
        carried over; False when every row is the start of a stream (state None).
    """

    inputs: Tensor
    targets: Tensor
    continues: bool

    @property
    def n_steps(self) -> int:
        """How much there is to read: the tokens, or the frames, of all rows."""
        return self.inputs.shape[0] * self.inputs.shape[1]


@runtime_checkable
class BatchSource(Protocol):
    """The batches of one split, as one rank sees them."""

    batch_size: int
    """Rows of a full batch on this rank; the last batch of an epoch may have fewer."""

    def __len__(self) -> int:
        """Steps in an epoch, the same on every rank."""
        ...

    def batch(self, epoch: int, step: int) -> Batch:
        """The batch of a step: a pure function of (seed, epoch, step, rank).

        Raises IndexError where step is outside 0..len-1, and ValueError for a negative epoch.
        """
        ...


@runtime_checkable
class DataSet(Protocol):
    """Up to three splits, and what a target may be."""

    output_size: int
    """How many values a target may take."""

    def source(self, split: Split) -> BatchSource:
        """The batches of a split. Raises ValueError for a split that is not there."""
        ...


@runtime_checkable
class TokenDataSet(DataSet, Protocol):
    """A data set whose inputs are whole numbers below `vocab_size`."""

    vocab_size: int
    """How many values an input may take."""
