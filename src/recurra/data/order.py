"""The order of the data: random numbers that depend on a seed and on where in the run they are drawn."""

from functools import lru_cache

import numpy as np


def random_generator(seed: int, *place: int) -> np.random.Generator:
    """A generator for one place in a run.

    `place` starts with a number that tells one use of the seed from another and goes on with whatever the
    draw depends on (epoch, step). The same arguments give the same numbers in every process.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=place))


@lru_cache(maxsize=4)
def epoch_permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0..n-1, fresh for each (seed, epoch): (n,) int64, read-only.

    Kept for the last few epochs asked for, because every step of an epoch reads from it.
    """
    permutation = random_generator(seed, _EPOCH_ORDER, epoch).permutation(n)
    permutation.flags.writeable = False
    return permutation


def require_step(n_steps: int, epoch: int, step: int) -> None:
    """Raise ValueError for a negative epoch and IndexError for a step outside 0..n_steps-1."""
    if epoch < 0:
        raise ValueError(f"epoch must not be negative, got {epoch}")
    if not 0 <= step < n_steps:
        raise IndexError(f"step must lie in 0..{n_steps - 1}, got {step}")


# The uses of a seed. Each number is used once, so that no two draws are the same stream.
_EPOCH_ORDER = 1
MEMORY_HORIZON_TOKENS = 2
TEXT_WINDOWS = 3
VIDEO_CLIPS = 4
VIDEO_HELD_OUT = 5
MOTIONS = 6
