"""Which samples a step holds, where samples are independent of each other."""

import torch

from recurra.data.order import epoch_permutation, require_step


class RowOrder:
    """The order of n samples in steps of `batch_size`, dealt to the ranks.

    With a seed (training): a new permutation each epoch. The last step is kept though it may be smaller. All ranks
    have equally many rows in a step, so that the mean of their mean losses is the mean over the batch: where the last
    step does not divide evenly, up to world_size - 1 samples of that epoch's permutation are left out.

    Without one (evaluation): the samples' own order, nothing left out. A rank whose share is short of a row gets a
    copy of another one, which does not count.

    batch_size: rows of a step over all ranks together. rows_here: those of a full step on this rank.
    """

    def __init__(self, n: int, *, batch_size: int, seed: int | None, rank: int = 0, world_size: int = 1) -> None:
        self.training = seed is not None
        self.rows_here = -(-batch_size // world_size)
        self._n = n
        self._rows_in_all = batch_size
        self._seed = seed
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        full, rest = divmod(self._n, self._rows_in_all)
        return full + (self._share(rest) > 0)

    def rows(self, epoch: int, step: int) -> tuple[list[int], int]:
        """The samples of this rank at a step, and how many of them, from the first on, count.

        Raises IndexError where step is outside 0..len-1, and ValueError for a negative epoch.
        """
        require_step(len(self), epoch, step)
        first = step * self._rows_in_all
        last = min(first + self._rows_in_all, self._n)
        share = self._share(last - first)
        places = torch.arange(first, last)[self._rank * share : (self._rank + 1) * share]
        n_missing = share - len(places)
        places = torch.cat([places, torch.full((n_missing,), first)])
        if self._seed is not None:
            places = torch.from_numpy(epoch_permutation(self._n, self._seed, epoch)[places.numpy()])
        return places.tolist(), share - n_missing

    def _share(self, rows: int) -> int:
        """Rows on each rank of a step of `rows` in all: rounded down in training, up in evaluation."""
        return rows // self._world_size if self.training else -(-rows // self._world_size)
