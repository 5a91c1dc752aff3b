"""Speculative decoding: a smaller model drafts tokens, and the model reads all of them in one call.

Leviathan et al., "Fast inference from transformers via speculative decoding" (arXiv 2211.17192), algorithm 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from recurra._choices import RECENT_TOKENS
from recurra.checks import require_whole_number, sentence
from recurra.streams.continuation import GeneratedText, Generation, GenerationConfig
from recurra.streams.stream import Continued, Input, Mark, Stream, feed_last

_LONGEST_UNREAD = 32
"""Maximum number of tokens to reread before a draft. More are read separately, once: without this limit, a text with
many rejected drafts would be read from its start in every call."""


class _Read(NamedTuple):
    """The results of a call: the stream's, if these tokens are given out."""

    tokens: list[int]
    logits: Float[Tensor, " V"]
    state: object


class _ModelAhead:
    """The stream of the model, after the last token given out: it follows a call if all of its draft is given out."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._unread: list[int] = []  # given out, and not in the stream
        self._read: _Read | None = None

    @property
    def recent(self) -> tuple[int, ...]:
        return (*self._stream.recent, *self._unread)[-RECENT_TOKENS:]

    def read(self, drafted: list[int]) -> Float[Tensor, "n V"]:
        if len(self._unread) > _LONGEST_UNREAD or not drafted:
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
        self._unread.append(token)
        if self._read is not None and self._read.tokens == self._unread:
            self._stream.advance(torch.tensor(self._unread, device="cpu"), self._read.logits, self._read.state)
            self._unread, self._read = [], None

    def settle(self) -> None:
        if self._unread:
            self._stream.feed(self._unread)
        self._unread, self._read = [], None


class _DraftAhead:
    """The stream of the draft model: it reads each token that it drafts, and goes back to the last one given out."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._drafted: list[int] = []
        self._marks: list[Mark] = [stream.mark()]  # before each drafted token
        self._taken: list[int] = []  # given out since the first mark

    def draw(self, n_tokens: int, generation: Generation) -> tuple[list[int], list[Float[Tensor, " V"]]]:
        if not n_tokens:
            return [], []
        self.settle()
        shares = []
        for number in range(n_tokens):
            if number:
                self._stream.step(self._drafted[-1])
                self._marks.append(self._stream.mark())
            shares.append(generation.distribution(self._stream.logits.cpu(), self._stream.recent, self._drafted))
            self._drafted.append(int(shares[-1].multinomial(1, generator=generation.generator)))
        return list(self._drafted), shares

    def take(self, token: int) -> None:
        self._taken.append(token)

    def settle(self) -> None:
        same = [drafted == taken for drafted, taken in zip(self._drafted, self._taken)]
        n_kept = min([*same, False].index(False), len(self._marks) - 1)
        self._stream.rewind(self._marks[n_kept])
        if left := self._taken[n_kept:]:
            self._stream.feed(left)
        self._drafted, self._marks, self._taken = [], [self._stream.mark()], []


@dataclass
class Drafts:
    """Counts of drafted and accepted tokens so far."""

    n_drafted: int = 0
    """Tokens that were drafted."""
    n_accepted: int = 0
    """Drafted tokens that were accepted."""
    n_calls: int = 0
    """Calls of the model that read drafts."""

    @property
    def acceptance_rate(self) -> float:
        """The share of drafted tokens that were accepted; NaN if none were drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else float("nan")


class Speculation(Continued):
    """A stream that is continued with drafts from a stream of a smaller model.

        speculation = Speculation(Stream(model, tokenizer), Stream(small_model, tokenizer))
        speculation.feed("the company said")
        text = "".join(speculation.generate_text(100))
        print(speculation.drafts.acceptance_rate)

    In each round, the draft model chooses a few tokens one by one, and the model reads them in one call. A rule then
    accepts as many as leave the model's distribution unchanged: the tokens have the same distribution as those of
    `Stream.generate`, and at temperature 0 they are the same, up to rounding of the logits. After a rejection, the
    stream returns to the state before the call and rereads the accepted tokens together with the next draft.

    The same seed gives the same tokens again, but not the same as without drafts. When the iterator of `generate` has
    ended or is closed, the stream has read all yielded tokens; until then, it may be behind.

    Args:
        stream: the stream to continue; it may already have read tokens.
        draft: a stream of the draft model, with the same vocabulary. If it has read nothing, it starts with the recent
            tokens of `stream`.
        n_drafted: number of tokens per draft.

    Raises:
        TypeError: n_drafted is not a whole number.
        ValueError: it is below 1, or the streams have different vocabularies.
    """

    def __init__(self, stream: Stream, draft: Stream, *, n_drafted: int = 4) -> None:
        require_whole_number(1, n_drafted=n_drafted)
        sizes = [getattr(getattr(one.model, "config", None), "vocab_size", None) for one in (stream, draft)]
        if sizes[0] != sizes[1]:
            expected = f"a model of {sizes[0]}, as the one it drafts for"
            raise ValueError(sentence("draft", f"of {sizes[1]} tokens", expected))
        tokenizers = [one.tokenizer for one in (stream, draft)]
        if None not in tokenizers and len({tokenizer.fingerprint for tokenizer in tokenizers if tokenizer}) > 1:
            hint = "its token ids would mean other words"
            raise ValueError(sentence("draft", "of another tokenizer", "one of the same", hint))
        self.stream, self.draft, self.n_drafted = stream, draft, n_drafted
        self.drafts = Drafts()

    @property
    def position(self) -> int:
        """Number of tokens read."""
        return self.stream.position

    def feed(self, what: Input) -> Float[Tensor, " V"]:
        """Feed both streams and return the model's logits after the last token. Raises what `Stream.feed` raises."""
        tokens = self.stream.encode(what)
        self._catch_up()
        logits = self.stream.feed(tokens)
        if len(tokens):
            self.draft.feed(tokens)
        return logits

    def _tokens(self, config: GenerationConfig) -> Iterator[int]:
        return self._generate(self.stream.generation(config))

    def generated_text(self, stop: Sequence[str]) -> GeneratedText:
        """Begin a text that continues the stream's; errors as `Stream.generated_text`."""
        return self.stream.generated_text(stop)

    def _generate(self, generation: Generation) -> Iterator[int]:
        self._catch_up()
        model, draft = _ModelAhead(self.stream), _DraftAhead(self.draft)
        try:
            while not generation.is_over:
                for token in self._round(model, draft, generation):
                    model.take(token)
                    draft.take(token)
                    generation.count(token)
                    yield token
                    if generation.is_over:
                        break
        finally:
            model.settle()
            draft.settle()

    def _round(self, model: _ModelAhead, draft: _DraftAhead, generation: Generation) -> list[int]:
        """The next tokens: the accepted ones, and one more that the model chooses."""
        n_left = generation.n_left
        n_drafted = self.n_drafted if n_left is None else min(self.n_drafted, n_left - 1)
        drafted, draft_shares = draft.draw(n_drafted, generation)
        before = model.recent
        rows = zip(model.read(drafted).cpu(), range(n_drafted + 1))
        shares = [generation.distribution(row, (*before, *drafted[:number]), drafted[:number]) for row, number in rows]
        n_accepted, token = accept(drafted, draft_shares, shares, generation.generator)
        self.drafts.n_drafted += n_drafted
        self.drafts.n_accepted += n_accepted
        self.drafts.n_calls += 1
        return [*drafted[:n_accepted], token]

    def _catch_up(self) -> None:
        if not self.draft.position and self.stream.recent:
            self.draft.feed(self.stream.recent)


def accept(
    drafted: Sequence[int],
    draft_shares: Sequence[Float[Tensor, " V"]],
    shares: Sequence[Float[Tensor, " V"]],
    generator: torch.Generator,
) -> tuple[int, int]:
    """Accept as many drafted tokens as leave the model's distribution unchanged, and choose the token after them.

    Token i is accepted with probability min(1, p_i / q_i). The token after the last accepted one is drawn from
    max(p - q, 0), normalised, if a token was rejected there, and otherwise from p (Leviathan et al., algorithm 1).

    `draft_shares` are the probabilities q of K drafted tokens, and `shares` are the model's p for each of them and for
    the token after them. The generator, on the CPU, is the only source of randomness.

    Returns:
        the number of accepted tokens, and the token after them.
    """
    for number, (token, q, p) in enumerate(zip(drafted, draft_shares, shares)):
        share = torch.rand((), dtype=torch.float64, device="cpu", generator=generator)
        if float(share * q[token]) < float(p[token]):
            continue
        rest = (p - q).clamp(min=0)
        # Rounding can leave nothing where p and q are the same.
        return number, _drawn(rest if bool(rest.sum() > 0) else p, generator)
    return len(drafted), _drawn(shares[len(drafted)], generator)


def _drawn(shares: Float[Tensor, " V"], generator: torch.Generator) -> int:
    return int(shares.multinomial(1, generator=generator))
