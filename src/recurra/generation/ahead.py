"""Streams that read ahead of what is given out, and go back to it: the two sides of speculative decoding."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.generation.feeding import feed_last
from recurra.generation.sampling import RECENT_TOKENS, SamplingConfig, distribution
from recurra.generation.stream import Mark, Stream

LONGEST_UNREAD = 32
"""How many tokens are read again in front of a draft, at most. More are read by themselves, once: without an end to
them, a text whose drafts are rejected again and again would be read from its start in every call."""


class _Read(NamedTuple):
    """The results of a call: the stream's, if these tokens are given out."""

    tokens: list[int]
    logits: Float[Tensor, " V"]
    state: object


class ModelAhead:
    """The stream of the model: a call reads a draft, and the stream follows if all of it is given out.

    Args:
        stream: stands after the last token that was given out.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._unread: list[int] = []  # given out, and not in the stream
        self._read: _Read | None = None

    @property
    def recent(self) -> tuple[int, ...]:
        """The last tokens that were given out."""
        return (*self._stream.recent, *self._unread)[-RECENT_TOKENS:]

    def read(self, drafted: list[int]) -> Float[Tensor, "n V"]:
        """Give the logits after the last token that was given out, and after each drafted one, from one call."""
        if len(self._unread) > LONGEST_UNREAD or not drafted:
            self.settle()
        if not drafted:
            return self._stream.logits[None]
        tokens = [*self._unread, *drafted]
        n_last = len(drafted) + bool(self._unread)
        before = self._stream.mark().stream.model_state
        logits, state = feed_last(self._stream.runner, self._stream.encode(tokens)[None], before, n_last)
        self._read = _Read(tokens, logits[0, -1].clone(), state)
        return logits[0] if self._unread else torch.cat([self._stream.logits[None], logits[0]])

    def take(self, token: int) -> None:
        """Note a token that is given out."""
        self._unread.append(token)
        if self._read is not None and self._read.tokens == self._unread:
            self._stream.advance(torch.tensor(self._unread, device="cpu"), self._read.logits, self._read.state)
            self._unread, self._read = [], None

    def settle(self) -> None:
        """Let the stream read all that was given out."""
        if self._unread:
            self._stream.feed(self._unread)
        self._unread, self._read = [], None


class DraftAhead:
    """The stream of the draft model: it reads each token that it drafts, and goes back to the last one given out.

    Args:
        stream: stands after the last token that was given out.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._drafted: list[int] = []
        self._marks: list[Mark] = [stream.mark()]  # before each drafted token
        self._taken: list[int] = []  # given out since the first mark

    def draw(
        self, n_tokens: int, sampling: SamplingConfig, generator: torch.Generator
    ) -> tuple[list[int], list[Float[Tensor, " V"]]]:
        """Choose tokens one by one; give them, and the probabilities that each was drawn from."""
        if not n_tokens:
            return [], []
        self.settle()
        shares = []
        for number in range(n_tokens):
            if number:
                self._stream.step(self._drafted[-1])
                self._marks.append(self._stream.mark())
            recent = torch.tensor(self._stream.recent, device="cpu")
            shares.append(distribution(self._stream.logits.cpu(), sampling, recent))
            self._drafted.append(int(shares[-1].multinomial(1, generator=generator)))
        return list(self._drafted), shares

    def take(self, token: int) -> None:
        """Note a token that is given out."""
        self._taken.append(token)

    def settle(self) -> None:
        """Let the stream read all that was given out, and nothing else."""
        same = [drafted == taken for drafted, taken in zip(self._drafted, self._taken)]
        n_kept = min([*same, False].index(False), len(self._marks) - 1)
        self._stream.rewind(self._marks[n_kept])
        if left := self._taken[n_kept:]:
            self._stream.feed(left)
        self._drafted, self._marks, self._taken = [], [self._stream.mark()], []
