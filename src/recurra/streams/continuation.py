"""How a stream is continued: settings, the choice of each token, and the resulting text."""

import operator
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, SupportsIndex, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from recurra.checks import require, require_whole_number, sentence
from recurra.streams.sampling import SamplingConfig, TokenChoice, choose, distribution


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How one stream is continued; the default draws from the model's own probabilities without a limit.

    Raises:
        TypeError: `max_tokens` or one of `stop_tokens` is not a whole number.
        ValueError: `max_tokens` is below 1, or `stop` is a single string or contains an empty one.
    """

    max_tokens: int | None = None
    """Maximum number of tokens; None for no limit."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How each token is chosen."""
    seed: int | torch.Generator = 0
    """Seed of the choices, or a generator on the CPU to draw from. Equal streams, settings and seeds give equal
    tokens."""
    stop_tokens: Collection[int] = ()
    """Generation ends after any of these tokens, which is also yielded."""
    stop: Sequence[str] = ()
    """Texts to stop at, for generated text only. The first to appear is left out, but the stream has read it."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            require_whole_number(1, max_tokens=self.max_tokens)
        try:
            stop_tokens = tuple(map(operator.index, self.stop_tokens))
        except TypeError:
            raise TypeError(sentence("stop_tokens", repr(self.stop_tokens), "a collection of whole numbers")) from None
        alone = isinstance(self.stop, str)
        require(not alone, "stop", self.stop, "texts in a list", "a text alone would be its letters")
        stop = tuple(self.stop)
        require("" not in stop, "stop", stop, "texts of at least one letter")
        # as they were read: an iterator is empty now
        object.__setattr__(self, "stop_tokens", stop_tokens)
        object.__setattr__(self, "stop", stop)


class Generation:
    """The token choices of one stream that is being continued."""

    def __init__(self, config: GenerationConfig) -> None:
        self.config, self.n_tokens, self.is_over = config, 0, False
        self.counts: Counter[int] = Counter()  # how often each token was chosen, if a penalty asks for it
        seed = config.seed
        self.generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
        self._stop_tokens = frozenset(config.stop_tokens)

    @property
    def n_left(self) -> int | None:
        """Number of tokens left to choose; None for no limit."""
        return None if self.config.max_tokens is None else self.config.max_tokens - self.n_tokens

    def token_choice(self, recent: Sequence[int]) -> TokenChoice:
        """How the next token is chosen after these, for `recurra.streams.sampling.choose`."""
        return TokenChoice(self.config.sampling, self.generator, recent, self.counts)

    def distribution(
        self, logits: Float[Tensor, " V"], recent: Sequence[int], drafted: Sequence[int] = ()
    ) -> Float[Tensor, " V"]:
        """Return the next token's probabilities after `recent`, which ends with `drafted`, which do not count yet."""
        choice = self.token_choice(recent)._replace(counts=self.counts + Counter(drafted))
        return distribution(logits, choice.config, *choice.past(len(logits)))

    def count(self, token: int) -> None:
        """Count a chosen token; `is_over` says whether it is the last."""
        self.n_tokens += 1
        if self.config.sampling.counts_tokens:
            self.counts[token] += 1
        self.is_over = token in self._stop_tokens or self.n_left == 0


def choose_all(
    generations: Sequence[Generation], logits: Float[Tensor, "B V"], recent: Sequence[Sequence[int]]
) -> list[int]:
    """Choose and count the next token of each stream, given its logits. Raises ValueError as `draw` does."""
    tokens = choose(logits, [one.token_choice(tokens) for one, tokens in zip(generations, recent)])
    for generation, token in zip(generations, tokens):
        if isinstance(token, ValueError):
            raise token
        generation.count(token)
    return cast(list[int], tokens)


_SHORTEST, _LONGEST_WINDOW = 8, 24  # tokens
_LONGEST_BEFORE = 64  # tokens, in which the beginning of a letter is looked for
_UNDECIDED = "\ufffd"  # what a tokenizer decodes bytes to that are not a letter, or not yet
_LONGEST = 3  # bytes of an incomplete letter


@runtime_checkable
class TextEncoder(Protocol):
    """Turns text into tokens and back: an encoder of `recurra.data`, or one of your own.

    It may also have `start`: tokens to put before a text, such as Gemma's <bos>.
    """

    @property
    def fingerprint(self) -> str:
        """A digest that differs whenever the tokens of some text differ."""
        ...

    def __len__(self) -> int:
        """How many tokens there are; they are 0..len-1."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Turn text into tokens: (n,) int64."""
        ...

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """Turn tokens back into text."""
        ...


def encode_first(tokenizer: TextEncoder, text: str) -> np.ndarray:
    """Turn a text at the start of a stream into tokens: (n,) int64.

    They are the tokens of `tokenizer.encode`, preceded by the tokenizer's start unless the text has it. An empty text
    has no tokens.
    """
    tokens = tokenizer.encode(text)
    start = start_of(tokenizer)
    if not len(tokens) or tuple(tokens[: len(start)].tolist()) == start:
        return tokens
    return np.concatenate([np.array(start, dtype=np.int64), tokens])


def first_tokens(tokenizer: TextEncoder) -> list[int]:
    """Return the beginning of a stream without a text: the tokenizer's start, or the end of a line."""
    return list(start_of(tokenizer)) or tokenizer.encode("\n").tolist()


def start_of(tokenizer: TextEncoder) -> tuple[int, ...]:
    """Return the tokens to put before a text; most tokenizers have none."""
    return getattr(tokenizer, "start", ())


class TextPieces:
    """The text of a stream of tokens, piece by piece; joined, the pieces are the decoded text of all tokens.

    A byte-pair token may end inside a character; the piece is then withheld until the character is complete.
    Only the last few tokens are stored, for a stream of any length.

    Args:
        tokenizer: decodes the tokens.
        before: the tokens before the first piece; with a word-level tokenizer, they put a blank before it.
    """

    def __init__(self, tokenizer: TextEncoder, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        starts = (list(before)[-n:] for n in range(_LONGEST_BEFORE, _LONGEST_BEFORE - _LONGEST - 1, -1))
        self._window = min(starts, key=lambda tokens: tokenizer.decode(tokens).count(_UNDECIDED))
        self._window = self._tail(self._text())
        # They may end inside a letter, with which some decoders take back the whole letters before it.
        ends = (self._window[: len(self._window) - n] for n in range(_LONGEST + 1))
        texts = (tokenizer.decode(end) for end in ends if end)
        self._given = next((text for text in texts if not text.endswith(_UNDECIDED)), _settled(self._text()))
        """The text of the window's tokens, as far as it was given out or lies before the first piece."""

    def add(self, token: int) -> str:
        """Return the text completed by the next token; often "" inside a character of several bytes."""
        self._window.append(token)
        text = self._text()
        now, is_long = _settled(text), len(self._window) > 2 * _LONGEST_WINDOW
        # Tokenizers with a token for each byte decode a run of these as a whole: text that was given reads as undecided
        # again until the letter at its end is complete, or for ever if none is.
        if not now.startswith(self._given) and not is_long and text.endswith(_UNDECIDED):
            return ""
        piece, self._given = now[len(self._given) :], now
        if is_long or (len(self._window) > _LONGEST_WINDOW and now == text):
            self._window = self._tail(text)
            self._given = _settled(self._text())
        return piece

    def flush(self) -> str:
        """Return the text still withheld at the end: a character that was never completed, as U+FFFD."""
        return self._text()[len(self._given) :]

    def _tail(self, text: str) -> list[int]:
        """The last tokens of the window, from the beginning of a letter on where there is one."""
        tails = (self._window[-n:] for n in range(_SHORTEST, _SHORTEST + _LONGEST + 1))
        return next((tail for tail in tails if text.endswith(self._tokenizer.decode(tail))), self._window[-_SHORTEST:])

    def _text(self) -> str:
        return self._tokenizer.decode(self._window)


def _settled(text: str) -> str:
    """Cut off the end that the next token may change."""
    n_undecided = len(text) - len(text.rstrip(_UNDECIDED))
    return text[: len(text) - min(n_undecided, _LONGEST)]


class GeneratedText:
    """The text of the tokens generated after those in `before`, piece by piece, up to the first of `stops`."""

    def __init__(self, tokenizer: TextEncoder, before: Sequence[int], stops: Sequence[str]) -> None:
        self._pieces, self._stops, self._held = TextPieces(tokenizer, before), stops, ""
        self.is_over = False
        """Whether a stop was found; no token after it counts."""
        self.n_characters = 0
        """Length of the text of all tokens so far, with what is held back and a stop."""

    def add(self, token: int) -> str:
        """Give the text that the next token settles, as far as it can be passed on; it may be ""."""
        piece = self._pieces.add(token)
        self.n_characters += len(piece)
        return self._passed_on(piece)

    def flush(self) -> str:
        """Give what is still held back after the last token; "" if a stop was found."""
        text = "" if self.is_over else self._passed_on(self._pieces.flush()) + self._held
        self._held = ""
        return text

    def _passed_on(self, piece: str) -> str:
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.is_over = bool(places)
        end = min(places) if places else len(text) - self._n_begun(text)
        self._held = "" if places else text[end:]
        return text[:end]

    def _n_begun(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop."""
        most = len(text) + 1
        lengths = (n for stop in self._stops for n in range(1, min(len(stop), most)) if text.endswith(stop[:n]))
        return max(lengths, default=0)


def pieces_of_text(tokens: Iterator[int], text: GeneratedText) -> Iterator[str]:
    """Give the text of `tokens` piece by piece, up to a stop; `tokens` that can be closed are closed then."""
    try:
        for token in tokens:
            if piece := text.add(token):
                yield piece
            if text.is_over:
                return
        if piece := text.flush():
            yield piece
    finally:
        if isinstance(tokens, Generator):
            tokens.close()
