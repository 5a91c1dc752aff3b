"""The level of its training data that a run has reached, where levels wait until the one before is learned."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recurra.data import BatchSource, LevelledSource
from recurra.training.metrics import RunningSums
from recurra.training.ranks import Ranks


class Levels:
    """Goes through the levels of a `LevelledSource`; any other source has one level, which never ends.

    A level is learned if the mean training loss of a whole epoch is below `level_loss`. The next one then begins with
    the next epoch. What it depends on is in `state_dict`, so a resumed run takes the same steps.
    """

    def __init__(self, source: BatchSource, device: torch.device | str) -> None:
        self.source = source
        """The batches of the present level."""
        self._levelled = source if isinstance(source, LevelledSource) else None
        self._sums = RunningSums(device)
        self._enter(0)
        self._trained = 0

    def _enter(self, level: int) -> None:
        self._level = level
        if self._levelled is not None:
            self.source = self._levelled.at_level(level)

    @property
    def record(self) -> dict[str, int]:
        """The level of the last batch, for the log; empty if there is only one."""
        return {} if self._levelled is None else {"level": self._trained}

    def add(self, loss: Tensor, n_targets: int) -> None:
        """Add a batch of the present epoch: its summed loss, and the number of its targets that count."""
        self._trained = self._level
        if self._levelled is not None:
            self._sums.add(loss, n_targets, 0)

    def end_epoch(self, ranks: Ranks) -> None:
        """Go to the next level if this one is learned. All ranks call it together."""
        if self._levelled is None:
            return
        self._sums.add_up(ranks)
        learned = self._sums.mean_loss() < self._levelled.level_loss
        self._enter(min(self._level + learned, self._levelled.n_levels))
        self._sums = RunningSums(self._sums.loss.device)

    def state_dict(self, ranks: Ranks) -> dict[str, Any]:
        """Return the level and the sums of its present epoch, over all ranks, as numbers."""
        return {"level": self._level, "epoch": self._sums.state_dict(ranks)}

    def load_state_dict(self, saved: Mapping[str, Any], ranks: Ranks) -> None:
        """Continue from the numbers of `state_dict`."""
        self._enter(saved["level"])
        self._trained = self._level
        self._sums.load_state_dict(saved["epoch"], ranks)
