"""Data sets as numbered batches, whose order depends on nothing but a seed and the position in the run."""

from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from recurra._choices import Split
from recurra.checks import kind_of, require, require_at_least, sentence


class Poses(NamedTuple):
    """The poses in the clips of a batch, for training only.

    joints: (x, y) of each joint in each frame, in pixels of the clip from its upper left corner; NaN where a joint was
    not found. Joints outside of the clip's picture have their places there.
    features: what a skeleton model says of each segment; NaN where there is nothing, None if there is none at all.
    """

    joints: Float[Tensor, "B T J 2"]
    features: Float[Tensor, "B S F"] | None = None


def joint_targets(
    joints: Float[Tensor, "N T J 2"], *, image_size: int, patch_size: int
) -> tuple[Float[Tensor, "N P T J"], Bool[Tensor, "N T J"]]:
    """Return which joints lie in each patch of each frame, 1 or 0, and which joints were found.

    Patch (row, column) sees the places with row <= y / patch_size < row + 1, and x likewise. Patches are numbered row
    by row. A joint outside of the picture lies in no patch; one that was not found has zeros that do not count.
    """
    require(image_size % patch_size == 0, "patch_size", patch_size, f"a divisor of image_size = {image_size}")
    edge = image_size // patch_size
    found = joints.isfinite().all(-1)
    inside = found & ((joints >= 0) & (joints < image_size)).all(-1)
    column, row = joints.where(inside[..., None], 0.0).div(patch_size).floor().long().unbind(-1)
    seen = functional.one_hot(row * edge + column, edge**2) * inside[..., None]
    return seen.movedim(-1, 1).to(joints.dtype), found


def require_poses(poses: Poses, clip: Tensor, *, n_segments: int, n_joints: int, d_features: int) -> None:
    """Refuse poses that are not of these clips or of another skeleton."""
    expected = (*clip.shape[:2], n_joints, 2)
    if tuple(poses.joints.shape) != expected:
        raise ValueError(sentence("poses.joints", kind_of(poses.joints), f"(batch, frames, n_joints, 2) = {expected}"))
    expected = (clip.shape[0], n_segments, d_features)
    if poses.features is not None and tuple(poses.features.shape) != expected:
        got = kind_of(poses.features)
        raise ValueError(sentence("poses.features", got, f"(batch, segments, d_skeleton) = {expected}"))


def random_generator(seed: int, *place: int) -> np.random.Generator:
    """Make a generator for one place in a run: a number for the use of the seed, then the epoch, the step and so on."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=place))


@lru_cache(maxsize=4)
def _epoch_permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Draw a permutation of 0..n-1, a new one for each (seed, epoch): (n,) int64, read-only."""
    permutation = random_generator(seed, _EPOCH_ORDER, epoch).permutation(n)
    permutation.flags.writeable = False
    return permutation


def require_step(n_steps: int, epoch: int, step: int) -> None:
    """Raise ValueError for a negative epoch and IndexError for a step outside 0..n_steps-1."""
    require_at_least(0, epoch=epoch)
    if not 0 <= step < n_steps:
        raise IndexError(sentence("step", step, f"a step of the epoch, 0 to {n_steps - 1}"))


def require_rank(rank: int, world_size: int, batch_size: int) -> None:
    """Raise ValueError unless `rank` is one of `world_size` ranks that can share a batch evenly."""
    require_at_least(1, world_size=world_size)
    require(0 <= rank < world_size, "rank", rank, f"a rank below world_size = {world_size}")
    whole, hint = f"a multiple of world_size = {world_size}", "it counts the sequences of all ranks together"
    require(batch_size % world_size == 0, "data.batch_size", batch_size, whole, hint)


# The uses of a seed. No two uses share a number, so no two draws share a stream.
_EPOCH_ORDER = 1
MEMORY_HORIZON_TOKENS = 2
TEXT_EXCERPTS = 3
TEXT_STEP_LENGTHS = 8
TEXT_SHIFTS = 12
VIDEO_CLIPS = 4
VIDEO_HELD_OUT = 5
MOTIONS = 6
TASKS = 7
SHARDS = 9
MIXTURES = 10
MEMORY_HORIZON_WINDOWS = 11


class SampleOrder:
    """Orders n samples in steps of `batch_size` and deals them to the ranks.

    With a seed (training), each epoch is a new permutation. All ranks have the same number of samples in a step: if
    the last step does not divide evenly, up to world_size - 1 samples are dropped. Without a seed (evaluation), samples
    keep their order and none is dropped: a rank that is short of one gets a copy of another, which does not count.

    n: samples. batch_size: of all ranks together; the attribute of the same name counts those on this rank.
    """

    def __init__(self, n: int, *, batch_size: int, seed: int | None, rank: int = 0, world_size: int = 1) -> None:
        self.training = seed is not None
        self.batch_size = -(-batch_size // world_size)
        self._n = n
        self._all_ranks = batch_size
        self._seed = seed
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        full, rest = divmod(self._n, self._all_ranks)
        return full + (self._share(rest) > 0)

    def samples(self, epoch: int, step: int) -> tuple[list[int], int]:
        """Return this rank's samples at a step, and how many of them count: the first ones do."""
        require_step(len(self), epoch, step)
        first = step * self._all_ranks
        last = min(first + self._all_ranks, self._n)
        share = self._share(last - first)
        places = torch.arange(first, last)[self._rank * share : (self._rank + 1) * share]
        n_missing = share - len(places)
        places = torch.cat([places, torch.full((n_missing,), first)])
        if self._seed is not None:
            places = torch.from_numpy(_epoch_permutation(self._n, self._seed, epoch)[places.numpy()])
        return places.tolist(), share - n_missing

    def _share(self, n: int) -> int:
        """Each rank's share of a step of `n` samples: rounded down in training, up in evaluation."""
        return n // self._world_size if self.training else -(-n // self._world_size)


# A batch is a pure function of (seed, epoch, step, rank). Reading one changes nothing in its source, so a run can
# resume from (epoch, step) alone, and two runs can read the same source.


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

    def batch(self, epoch: int, step: int) -> Batch:
        """Return the batch of a step. Raises IndexError for one outside 0..len-1, ValueError for a negative epoch."""


@runtime_checkable
class LevelledSource(BatchSource, Protocol):
    """Training batches in levels; the next level begins when the current one is learned."""

    n_levels: int
    """Levels above the first one, which is 0."""
    level_loss: float
    """The mean training loss of an epoch, in nats per target, below which a level is learned."""

    def at_level(self, level: int) -> BatchSource:
        """Return the batches of a level, as many in an epoch as at every other."""


@runtime_checkable
class DataSet(Protocol):
    """Up to three splits, and the number of values that a target may take."""

    output_size: int
    """How many values a target may take."""

    def source(self, split: Split) -> BatchSource:
        """Return the batches of a split. Raises ValueError for a split that the data set does not have."""


@runtime_checkable
class TokenDataSet(DataSet, Protocol):
    """A data set whose inputs are tokens: whole numbers below `vocab_size`."""

    vocab_size: int
    """How many values an input may take."""
