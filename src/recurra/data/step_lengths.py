"""Training steps of drawn lengths, so that gradients are not cut at the same places in every epoch.

After Merity et al., "Regularizing and optimizing LSTM language models" (2017): lengths come from a normal distribution
around the usual one or, for some of the steps, around half of it.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from recurra.data.order import TEXT_STEP_LENGTHS, random_generator

SHORTEST = 5
"""Shorter draws are lengthened to it, as in the published code."""


class DrawnLengths(NamedTuple):
    """The distribution of the lengths of training steps.

    usual: tokens in most steps. deviation: their standard deviation. half_share: the share of steps that are drawn
    around half the usual length. seed: of the draws.
    """

    usual: int
    deviation: float
    half_share: float
    seed: int

    @property
    def mean(self) -> float:
        """The mean length of a step."""
        return self.usual * (1.0 - 0.5 * self.half_share)

    def n_steps(self, total: int) -> int:
        """Return how many steps read `total` tokens: the same in every epoch."""
        return min(total, max(1, round(total / self.mean)))

    def borders(self, total: int, epoch: int) -> Int[np.ndarray, " borders"]:
        """Cut `total` tokens into steps: the first token of each and the end, new for every epoch.

        The draws are scaled by a factor near 1, so that every epoch reads the whole text in the same number of steps.
        """
        return _borders(self, total, epoch)


@lru_cache(maxsize=4)  # every step of an epoch asks for them
def _borders(lengths: DrawnLengths, total: int, epoch: int) -> np.ndarray:
    random, n = random_generator(lengths.seed, TEXT_STEP_LENGTHS, epoch), lengths.n_steps(total)
    centres = np.where(random.random(n) < lengths.half_share, lengths.usual / 2, lengths.usual)
    ends = np.maximum(SHORTEST, random.normal(centres, lengths.deviation)).cumsum()
    # of the tokens beyond one a step, so that no step is empty
    borders = np.arange(n + 1) + np.concatenate([[0], np.rint(ends / ends[-1] * (total - n))]).astype(np.int64)
    borders.flags.writeable = False
    return borders
