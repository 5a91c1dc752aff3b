"""Batches from one long text: parallel contiguous streams, or windows at random places."""

import numpy as np
import torch

from recurra.data.batches import IGNORED_TARGET, Batch
from recurra.data.order import TEXT_WINDOWS, random_generator, require_step


class StreamSource:
    """Contiguous streams side by side, cut into segments in order; the target is the next token.

    The text is cut into `batch_size` runs of neighbouring tokens, one a row, dealt to the ranks in order.
    Segment s of a row goes on where segment s-1 ended, so every step but the first carries the state. The
    epochs are alike.

    In training every row has the same whole number of segments, and the rest of the text is left out.

    In evaluation every token but the very first, which has nothing before it, is a target exactly once,
    whatever the batch size: the runs differ by one token at most, the last segment may be shorter, and a row
    with nothing left (also where `world_size` does not divide `batch_size`) has token 0 as input and ignored
    targets.

    tokens: (n,) numbers. batch_size: rows over all ranks together; the attribute of that name counts this
    rank's.

    Raises ValueError for a text that is too short.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        batch_size: int,
        segment_length: int,
        training: bool,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        n_targets = len(tokens) - 1
        if training and n_targets < batch_size * segment_length:
            raise ValueError(
                f"the training text has {len(tokens)} tokens, too few for a step of batch_size {batch_size} "
                f"rows of segment_length {segment_length}, which takes {batch_size * segment_length + 1}"
            )
        if n_targets < 1:
            raise ValueError(f"the text has {len(tokens)} tokens; 2 are needed to predict one from another")
        self.batch_size = -(-batch_size // world_size)
        edges = np.arange(batch_size + 1) * n_targets // batch_size
        lengths = np.diff(edges)
        if training:
            lengths[:] = lengths.min() // segment_length * segment_length
        mine = slice(rank * self.batch_size, (rank + 1) * self.batch_size)
        self._rows = list(zip(edges[:-1][mine].tolist(), lengths[mine].tolist()))
        self._tokens = tokens
        self._segment_length = segment_length
        self._longest = int(lengths.max())

    def __len__(self) -> int:
        return -(-self._longest // self._segment_length)

    def batch(self, epoch: int, step: int) -> Batch:
        """The segment of every row at a step. Raises as `BatchSource.batch` says."""
        require_step(len(self), epoch, step)
        first = step * self._segment_length
        width = min(self._segment_length, self._longest - first)
        inputs = np.zeros((self.batch_size, width), dtype=np.int64)
        targets = np.full((self.batch_size, width), IGNORED_TARGET, dtype=np.int64)
        for row, (start, length) in enumerate(self._rows):
            n = min(width, length - first)
            if n > 0:
                segment = self._tokens[start + first : start + first + n + 1]
                inputs[row, :n] = segment[:-1]
                targets[row, :n] = segment[1:]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), continues=step > 0)


class WindowSource:
    """Windows at random places, each the start of a stream; the target is the next token.

    The windows of a step are drawn anew from (seed, epoch, step), every place in the text being as likely as
    any other, and dealt to the ranks in order: what a step holds does not depend on the number of ranks. An
    epoch has as many steps as it takes to read as many tokens as the text has (at least one).

    tokens: (n,) numbers. batch_size: rows over all ranks together, a multiple of world_size; the attribute
    of that name counts this rank's.

    Raises ValueError for a text shorter than one window and its last target.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        batch_size: int,
        segment_length: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if len(tokens) <= segment_length:
            raise ValueError(
                f"the training text has {len(tokens)} tokens, too few for a window of segment_length "
                f"{segment_length}, which takes {segment_length + 1}"
            )
        self.batch_size = batch_size // world_size
        self._tokens = tokens
        self._rows_in_all = batch_size
        self._segment_length = segment_length
        self._seed = seed
        self._rank = rank

    def __len__(self) -> int:
        return max(1, (len(self._tokens) - 1) // (self._rows_in_all * self._segment_length))

    def batch(self, epoch: int, step: int) -> Batch:
        """The windows of a step. Raises as `BatchSource.batch` says."""
        require_step(len(self), epoch, step)
        random = random_generator(self._seed, TEXT_WINDOWS, epoch, step)
        starts = random.integers(0, len(self._tokens) - self._segment_length, size=self._rows_in_all)
        mine = starts[self._rank * self.batch_size : (self._rank + 1) * self.batch_size]
        rows = np.stack([self._tokens[start : start + self._segment_length + 1] for start in mine])
        windows = torch.from_numpy(rows.astype(np.int64))
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), continues=False)
