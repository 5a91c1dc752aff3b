"""Excerpts from several corpora, each drawn as often as its weight says."""

from collections.abc import Sequence

import numpy as np
import torch

from recurra.checks import require
from recurra.data.batches import Batch
from recurra.data.order import MIXTURES, random_generator, require_step
from recurra.data.shards import ShardedTokens


class MixtureSource:
    """Excerpts from random places of several texts, each the start of a new stream.

    The excerpts of a step depend on (seed, epoch, step) alone, whatever the number of ranks. An epoch has as many steps
    as it takes to read as many tokens as all texts have together.

    texts: of prepared corpora with one vocabulary. weights: above 0, one for each; only their ratios count. batch_size:
    excerpts over all ranks together; the attribute of the same name counts those on this rank.

    Raises ValueError for a text shorter than an excerpt.
    """

    def __init__(
        self,
        texts: Sequence[ShardedTokens],
        weights: Sequence[float],
        *,
        batch_size: int,
        segment_length: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        for text in texts:
            require(len(text) > segment_length, "the tokens of a text", len(text), f"at least {segment_length + 1}")
        self.batch_size = batch_size // world_size
        self._texts, self._shares = texts, np.asarray(weights) / sum(weights)
        self._all_ranks, self._segment_length = batch_size, segment_length
        self._seed, self._rank = seed, rank

    def __len__(self) -> int:
        return max(1, sum(map(len, self._texts)) // (self._all_ranks * self._segment_length))

    def batch(self, epoch: int, step: int) -> Batch:
        """Return the excerpts of a step. Raises what `BatchSource.batch` raises."""
        require_step(len(self), epoch, step)
        random = random_generator(self._seed, MIXTURES, epoch, step)
        chosen = random.choice(len(self._texts), size=self._all_ranks, p=self._shares)
        places = random.random(self._all_ranks)
        mine = slice(self._rank * self.batch_size, (self._rank + 1) * self.batch_size)
        excerpts = []
        for number, place in zip(chosen[mine].tolist(), places[mine].tolist()):
            start = int(place * (len(self._texts[number]) - self._segment_length))
            excerpts.append(self._texts[number][start : start + self._segment_length + 1].astype(np.int64))
        tokens = torch.from_numpy(np.stack(excerpts))
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), continues=False)
