"""The learning-rate range test: train for some steps while the rate grows, and see where the loss stops falling.

After Smith, "Cyclical learning rates for training neural networks" (arXiv 1506.01186).
"""

import math
from itertools import pairwise
from typing import NamedTuple

from recurra.checks import require, require_at_least
from recurra.training.loop import Trainer


class RateTest(NamedTuple):
    """The factors on the recipe's learning rates that were tried, and the smoothed loss before the update of each."""

    factors: list[float]
    losses: list[float]

    @property
    def steepest(self) -> float:
        """The factor at which the loss fell fastest."""
        falls = [after - before for before, after in pairwise(self.losses)]
        return self.factors[falls.index(min(falls))] if falls else self.factors[0]


def find_rate(trainer: Trainer, *, lowest: float = 1e-3, highest: float = 100.0, n_steps: int = 100) -> RateTest:
    """Train with rates from `lowest` to `highest` times those of the recipe, growing by the same factor each step.

    It ends before `n_steps` once the loss is four times the least. The trainer is used up; nothing is written.

    Args:
        trainer: a fresh one.
        lowest, highest: factors on the recipe's rates, above 0.
        n_steps: updates, at least 1.

    Raises:
        ValueError: there are no steps, or the first loss is not finite.
    """
    require_at_least(1, n_steps=n_steps)
    growth = (highest / lowest) ** (1 / max(1, n_steps - 1))
    factors: list[float] = []
    losses: list[float] = []
    smoothed = least = math.nan
    for number in range(n_steps):
        factor = lowest * growth**number
        loss = trainer.update_at(factor)
        smoothed = loss if math.isnan(smoothed) else 0.9 * smoothed + 0.1 * loss
        least = smoothed if math.isnan(least) else min(least, smoothed)
        if not math.isfinite(loss) or smoothed > 4 * least:
            break
        factors.append(factor)
        losses.append(smoothed)
    require(bool(losses), "the loss before the first update", loss, "a finite number")
    return RateTest(factors, losses)
