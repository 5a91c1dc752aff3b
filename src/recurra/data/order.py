"""The order of the data: random numbers that depend only on a seed and a place in the run, and checks of that place."""

from functools import lru_cache

import numpy as np

from recurra.checks import require, require_at_least, sentence


def random_generator(seed: int, *place: int) -> np.random.Generator:
    """Make a generator for one place in a run.

    `place` starts with a number for the use of the seed, then lists whatever the draw depends on (epoch, step). The
    same arguments give the same numbers in every process.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=place))


@lru_cache(maxsize=4)
def epoch_permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Draw a permutation of 0..n-1, a new one for each (seed, epoch): (n,) int64, read-only.

    Those of the last few epochs are cached, because every step of an epoch reads from the same one.
    """
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
    whole, mend = f"a multiple of world_size = {world_size}", "it counts the sequences of all ranks together"
    require(batch_size % world_size == 0, "data.batch_size", batch_size, whole, mend)


# The uses of a seed. No two uses share a number, so no two draws share a stream.
_EPOCH_ORDER = 1
MEMORY_HORIZON_TOKENS = 2
TEXT_EXCERPTS = 3
VIDEO_CLIPS = 4
VIDEO_HELD_OUT = 5
MOTIONS = 6
TASKS = 7
TEXT_STEP_LENGTHS = 8
SHARDS = 9
MIXTURES = 10
MEMORY_HORIZON_WINDOWS = 11
TEXT_SHIFTS = 12
