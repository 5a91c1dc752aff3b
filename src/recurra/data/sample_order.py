"""Which samples make up a step, for data whose samples do not depend on each other."""

import torch

from recurra.data.order import epoch_permutation, require_step


class SampleOrder:
    """Orders n samples in steps of `batch_size` and deals them to the ranks.

    With a seed (training), each epoch is a new permutation. The last step is kept even if it is smaller. All ranks have
    the same number of samples in a step, so that the mean of their mean losses is the mean over the batch: if the last
    step does not divide evenly, up to world_size - 1 samples of that epoch's permutation are dropped.

    Without a seed (evaluation), samples keep their own order and none is dropped. A rank that is short of a sample gets
    a copy of another one, which does not count.

    n: samples. batch_size: samples per step over all ranks together; the attribute of the same name counts those on
    this rank.
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
        """Return this rank's samples at a step, and how many of them count: the first ones do.

        Raises IndexError for a step outside 0..len-1, and ValueError for a negative epoch.
        """
        require_step(len(self), epoch, step)
        first = step * self._all_ranks
        last = min(first + self._all_ranks, self._n)
        share = self._share(last - first)
        places = torch.arange(first, last)[self._rank * share : (self._rank + 1) * share]
        n_missing = share - len(places)
        places = torch.cat([places, torch.full((n_missing,), first)])
        if self._seed is not None:
            places = torch.from_numpy(epoch_permutation(self._n, self._seed, epoch)[places.numpy()])
        return places.tolist(), share - n_missing

    def _share(self, n: int) -> int:
        """Each rank's share of a step of `n` samples: rounded down in training, up in evaluation."""
        return n // self._world_size if self.training else -(-n // self._world_size)
