"""Batches from one long text: parallel streams, windows that overlap, or excerpts from random places.

The argument `batch_size` counts the sequences of all ranks together, and the attribute those of this rank.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int

from recurra.checks import require
from recurra.data.batches import (
    IGNORED_TARGET,
    MIXTURES,
    TEXT_EXCERPTS,
    TEXT_SHIFTS,
    TEXT_STEP_LENGTHS,
    Batch,
    random_generator,
    require_step,
)
from recurra.data.corpus import ShardedTokens

_Tokens = np.ndarray | ShardedTokens
"""(n,) numbers, in memory or on disk."""
_LENGTH = "the number of tokens in the text"
_SHORTEST = 5
"""Shorter draws are lengthened to it, as in the published code."""


class DrawnLengths(NamedTuple):
    """The distribution of the lengths of training steps (Merity et al., "Regularizing and optimizing LSTM language
    models", 2017), so that gradients are not cut at the same places in every epoch.

    usual: tokens in most steps. deviation: their standard deviation. half_share: the share of steps that are drawn
    around half the usual length. seed: of the draws.
    """

    usual: int
    deviation: float
    half_share: float
    seed: int

    def n_steps(self, total: int) -> int:
        """Return how many steps read `total` tokens: the same in every epoch."""
        return min(total, max(1, round(total / (self.usual * (1.0 - 0.5 * self.half_share)))))

    @lru_cache(maxsize=4)  # noqa: B019 - every step of an epoch asks for them
    def borders(self, total: int, epoch: int) -> Int[np.ndarray, " borders"]:
        """Cut `total` tokens into steps: the first token of each and the end, new for every epoch.

        The draws are scaled by a factor near 1, so that every epoch reads the whole text in the same number of steps.
        """
        random, n = random_generator(self.seed, TEXT_STEP_LENGTHS, epoch), self.n_steps(total)
        centres = np.where(random.random(n) < self.half_share, self.usual / 2, self.usual)
        ends = np.maximum(_SHORTEST, random.normal(centres, self.deviation)).cumsum()
        # of the tokens beyond one a step, so that no step is empty
        borders = np.arange(n + 1) + np.concatenate([[0], np.rint(ends / ends[-1] * (total - n))]).astype(np.int64)
        borders.flags.writeable = False
        return borders


class StreamSource:
    """Parallel streams, read one segment per step; the target is the next token.

    The text is cut into `batch_size` streams of neighbouring tokens, dealt to the ranks in order. Each step continues
    every stream where the step before ended, so every step but the first carries the state.

    In training, all streams have the same whole number of segments, and the rest of the text is dropped.

    In evaluation, every token is a target exactly once, whatever the batch size, except the very first, which has
    nothing before it. The lengths of the streams differ by one token at most, and the last segment may be shorter. A
    stream that has ended gets token 0 as input and ignored targets; so does the stream that a rank lacks if
    `world_size` does not divide `batch_size`.

    drawn: the lengths of training steps; None for steps of one segment. shuffle_seed: in training, read the shards of
    the text in a different order in each epoch; None for texts without shards. shift_seed: in training, begin all
    streams of an epoch later by the same random number of tokens, less than a segment; None for no shift.
    """

    def __init__(
        self,
        tokens: _Tokens,
        *,
        batch_size: int,
        segment_length: int,
        training: bool,
        drawn: DrawnLengths | None = None,
        shuffle_seed: int | None = None,
        shift_seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._shift_seed = shift_seed if training else None
        room = 0 if self._shift_seed is None else segment_length - 1  # which the longest shift needs
        n_targets = len(tokens) - 1 - room
        if training:
            needed = batch_size * segment_length + 1 + room
            step = f"for one step with batch_size {batch_size} and segment_length {segment_length}"
            require(len(tokens) >= needed, _LENGTH, len(tokens), f"at least {needed}, {step}")
        require(n_targets >= 1, _LENGTH, len(tokens), "at least 2, to predict one token from another")
        self.batch_size = -(-batch_size // world_size)
        edges = np.arange(batch_size + 1) * n_targets // batch_size
        lengths = np.diff(edges)
        if training:
            lengths[:] = lengths.min() // segment_length * segment_length
        mine = slice(rank * self.batch_size, (rank + 1) * self.batch_size)
        self._streams = list(zip(edges[:-1][mine].tolist(), lengths[mine].tolist()))
        self._tokens = tokens
        self._segment_length = segment_length
        self._longest = int(lengths.max())
        self._shuffle_seed = shuffle_seed if training else None
        self._drawn = drawn if training else None

    def __len__(self) -> int:
        if self._drawn is not None:
            return self._drawn.n_steps(self._longest)
        return -(-self._longest // self._segment_length)

    def relative_length(self, epoch: int, step: int) -> float:
        """Return the length of a step over the usual one, by which its learning rate is scaled; 1 if none is drawn."""
        first, last = self._ends(epoch, step)
        return 1.0 if self._drawn is None else (last - first) / self._drawn.usual

    def _ends(self, epoch: int, step: int) -> tuple[int, int]:
        if self._drawn is None:
            return step * self._segment_length, min((step + 1) * self._segment_length, self._longest)
        first, last = self._drawn.borders(self._longest, epoch)[step : step + 2].tolist()
        return first, last

    def batch(self, epoch: int, step: int) -> Batch:
        require_step(len(self), epoch, step)
        first, last = self._ends(epoch, step)
        shift = 0
        if self._shift_seed is not None:
            shift = int(random_generator(self._shift_seed, TEXT_SHIFTS, epoch).integers(self._segment_length))
        width = last - first
        inputs = np.zeros((self.batch_size, width), dtype=np.int64)
        targets = np.full((self.batch_size, width), IGNORED_TARGET, dtype=np.int64)
        tokens = self._tokens
        if self._shuffle_seed is not None:
            tokens = tokens.shuffled(self._shuffle_seed, epoch)  # type: ignore[union-attr]
        for number, (start, length) in enumerate(self._streams):
            n = min(width, length - first)
            if n > 0:
                segment = tokens[shift + start + first : shift + start + first + n + 1]
                inputs[number, :n] = segment[:-1]
                targets[number, :n] = segment[1:]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), continues=step > 0)


class OverlappingSource:
    """Windows that overlap, for evaluation: each predicts `stride` tokens after reading up to `context` before them.

    Every token is a target exactly once, except the very first. Every window is the start of a new stream, so that what
    a model knows of the text is what it reads in the window. Windows at the start of the text have less before them;
    after the end of the text come token 0 and ignored targets.
    """

    def __init__(
        self, tokens: _Tokens, *, batch_size: int, stride: int, context: int, rank: int = 0, world_size: int = 1
    ) -> None:
        require(len(tokens) >= 2, _LENGTH, len(tokens), "at least 2, to predict one token from another")
        self.batch_size = -(-batch_size // world_size)
        self._tokens = tokens
        self._stride, self._context = stride, context
        self._first, self._step = rank * self.batch_size, world_size * self.batch_size

    def __len__(self) -> int:
        n_windows = -(-(len(self._tokens) - 1) // self._stride)
        return -(-n_windows // self._step)

    def batch(self, epoch: int, step: int) -> Batch:
        require_step(len(self), epoch, step)
        inputs = np.zeros((self.batch_size, self._context + self._stride), dtype=np.int64)
        targets = np.full_like(inputs, IGNORED_TARGET)
        for row in range(self.batch_size):
            scored = (step * self._step + self._first + row) * self._stride  # inputs from here on predict
            start = max(0, scored - self._context)
            window = self._tokens[start : scored + self._stride + 1]
            n = len(window) - 1
            if start + n > scored:
                inputs[row, :n] = window[:-1]
                targets[row, scored - start : n] = window[scored - start + 1 :]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), continues=False)


class ExcerptSource:
    """Excerpts from random places in the text, each the start of a new stream; the target is the next token.

    The excerpts of a step depend on (seed, epoch, step) alone, and every place in the text is equally likely. They are
    dealt to the ranks in order: the number of ranks does not change what a step reads. An epoch has as many steps as it
    takes to read as many tokens as the text has, and at least one.

    batch_size: a multiple of world_size. segment_length: tokens per excerpt.
    """

    def __init__(
        self, tokens: _Tokens, *, batch_size: int, segment_length: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        excerpt = f"for one excerpt with segment_length {segment_length}"
        require(len(tokens) > segment_length, _LENGTH, len(tokens), f"at least {segment_length + 1}, {excerpt}")
        self.batch_size = batch_size // world_size
        self._tokens = tokens
        self._all_ranks = batch_size
        self._segment_length = segment_length
        self._seed = seed
        self._rank = rank

    def __len__(self) -> int:
        return max(1, (len(self._tokens) - 1) // (self._all_ranks * self._segment_length))

    def batch(self, epoch: int, step: int) -> Batch:
        require_step(len(self), epoch, step)
        mine = slice(self._rank * self.batch_size, (self._rank + 1) * self.batch_size)
        length = self._segment_length + 1
        excerpts = [text[start : start + length].astype(np.int64) for text, start in self._places(epoch, step)[mine]]
        tokens = torch.from_numpy(np.stack(excerpts))
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), continues=False)

    def _places(self, epoch: int, step: int) -> list[tuple[_Tokens, int]]:
        """Draw the text and the place of each excerpt, over all ranks."""
        random = random_generator(self._seed, TEXT_EXCERPTS, epoch, step)
        starts = random.integers(0, len(self._tokens) - self._segment_length, size=self._all_ranks)
        return [(self._tokens, start) for start in starts.tolist()]


class MixtureSource(ExcerptSource):
    """Excerpts from random places of several texts of one vocabulary, otherwise as those of one text.

    weights: of the texts, above 0; only their ratios count.
    """

    def __init__(self, texts: Sequence[ShardedTokens], weights: Sequence[float], **options: Any) -> None:
        for text in texts:
            super().__init__(text, **options)
        self._texts, self._shares = texts, np.asarray(weights) / sum(weights)

    def __len__(self) -> int:
        return max(1, sum(map(len, self._texts)) // (self._all_ranks * self._segment_length))

    def _places(self, epoch: int, step: int) -> list[tuple[_Tokens, int]]:
        random = random_generator(self._seed, MIXTURES, epoch, step)
        chosen = random.choice(len(self._texts), size=self._all_ranks, p=self._shares).tolist()
        places = random.random(self._all_ranks).tolist()
        texts = [self._texts[number] for number in chosen]
        return [(text, int(place * (len(text) - self._segment_length))) for text, place in zip(texts, places)]


class PackedSource:
    """Rows of neighbouring tokens, cut where documents begin; the target is the next token of the same document.

    The shards are read in a different order in each epoch, row after row, and the rows are dealt to the ranks in order.
    If a row ends inside a document, the rest of the document begins the next row as a separate document.

    batch_size: rows, a multiple of world_size; they are joined to one sequence with `cu_seqlens`. row_length: tokens
    per row.
    """

    def __init__(
        self, tokens: ShardedTokens, *, batch_size: int, row_length: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        needed = batch_size * row_length + 1
        require(len(tokens) >= needed, _LENGTH, len(tokens), f"at least {needed}")
        self.batch_size = 1
        self._tokens, self._row_length, self._seed = tokens, row_length, seed
        self._rows = batch_size // world_size
        self._first, self._step = rank * self._rows, batch_size

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // (self._step * self._row_length)

    def batch(self, epoch: int, step: int) -> Batch:
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
