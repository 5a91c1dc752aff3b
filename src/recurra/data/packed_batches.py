"""Documents packed end to end: every sequence of a step is full, and no state crosses from one document to the next."""

import numpy as np
import torch

from recurra.checks import require
from recurra.data.batches import IGNORED_TARGET, Batch
from recurra.data.order import require_step
from recurra.data.shards import ShardedTokens


class PackedSource:
    """Rows of neighbouring tokens, cut where documents begin; the target is the next token of the same document.

    The shards are read in an order of its own for each epoch, row after row, and dealt to the ranks in order. Where a
    row ends inside a document, the rest of it begins the next row as a document of its own.

    tokens: of a prepared corpus. batch_size: rows over all ranks together, a multiple of world_size; the attribute of
    the same name counts the sequences of a batch, which is one, with borders. row_length: tokens of a row.

    Raises ValueError for a text that is too short for one step.
    """

    def __init__(
        self,
        tokens: ShardedTokens,
        *,
        batch_size: int,
        row_length: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        needed = batch_size * row_length + 1
        require(len(tokens) >= needed, "the number of tokens in the text", len(tokens), f"at least {needed}")
        self.batch_size = 1
        self._tokens, self._row_length, self._seed = tokens, row_length, seed
        self._rows = batch_size // world_size
        self._first, self._step = rank * self._rows, batch_size

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // (self._step * self._row_length)

    def batch(self, epoch: int, step: int) -> Batch:
        """Return the rows of a step, end to end. Raises what `BatchSource.batch` raises."""
        require_step(len(self), epoch, step)
        text = self._tokens.shuffled(self._seed, epoch)
        first = (step * self._step + self._first) * self._row_length
        last = first + self._rows * self._row_length
        tokens = text[first : last + 1].astype(np.int64)
        starts = text.document_starts(first, last + 1)
        targets = tokens[1:].copy()
        after = starts - first - 1  # the last token of a document has no target in it
        targets[after[(after >= 0) & (after < len(targets))]] = IGNORED_TARGET
        rows = np.arange(first, last, self._row_length)
        borders = np.unique(np.concatenate([rows, starts[starts < last], [last]])) - first
        return Batch(
            torch.from_numpy(tokens[:-1])[None],
            torch.from_numpy(targets)[None],
            continues=False,
            cu_seqlens=torch.from_numpy(borders),
        )
