"""A turn: tokens that a stream reads, and tokens that it then writes. The engine's unit of work, and what comes of it.

Turns are made by the HTTP side and handed to the engine, which alone changes them; results go out as events.
"""

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recurra.generation.generating import Generation, GenerationConfig
from recurra.generation.text import GeneratedText
from recurra.serving.place import Place
from recurra.serving.served_model import ServedModel


class Wanted(NamedTuple):
    """What a turn tells about each token beside the token itself.

    surprise: its log-probability.
    alternatives: how many of the likeliest tokens in its place, with theirs.
    answers: for tokens that are read, how many of the likeliest outputs after each.
    gates: the transitions with which the model reads it, in at most this many channels of a layer; 0 for none.
    """

    surprise: bool = False
    alternatives: int = 0
    answers: int = 0
    gates: int = 0

    @property
    def before(self) -> bool:
        """Whether it takes the logits before a token."""
        return self.surprise or self.alternatives > 0

    @property
    def after(self) -> bool:
        """Whether it takes reading the token itself."""
        return self.answers > 0 or self.gates > 0


class Share(NamedTuple):
    """An output of the model and its log-probability in nats."""

    id: int
    logprob: float


class TokenEvent(NamedTuple):
    """A token that was read or written.

    choice: which of the turn's continuations it belongs to.
    text: what it adds to the text; "" inside a letter of several bytes, or while a stop may begin.
    gates: see `recurra.serving.details`.
    """

    choice: int
    id: int
    text: str
    was_read: bool = False
    logprob: float | None = None
    alternatives: tuple[Share, ...] = ()
    answers: tuple[Share, ...] = ()
    gates: Any = None


class EndEvent(NamedTuple):
    """The end of one continuation, or of a turn that only reads.

    reason: "stop", "length", "read", "cancelled", "timeout" or "error".
    text: what was held back.
    message: what went wrong.
    """

    choice: int
    reason: str
    place: Place
    text: str = ""
    message: str = ""


Event = TokenEvent | EndEvent


MOST_MARKS = 64
"""Places that a turn keeps while it runs."""


@dataclass(eq=False)
class Turn:
    """One request to a stream.

    Args:
        model: what runs it.
        place: where the stream stands.
        tokens: what it reads.
        configs: how to continue it, one config for each continuation; empty if it only reads.
        wanted: what to tell of each token.
        tells_read: tell it of tokens that are read, too.
        mark_every: keep the state every so many tokens; 0 for never.
        deadline: on the clock of `time.monotonic`.
    """

    model: ServedModel
    place: Place
    tokens: list[int]
    configs: list[GenerationConfig]
    wanted: Wanted = field(default_factory=Wanted)
    tells_read: bool = True
    mark_every: int = 0
    deadline: float = float("inf")
    is_cancelled: bool = False
    n_read: int = 0
    marks: list[Place] = field(default_factory=list)
    submitted: float = field(default_factory=time.monotonic)

    def mark(self, place: Place) -> None:
        """Keep a place; of too many, every other one is dropped, and those to come are twice as far apart."""
        self.marks.append(place)
        if len(self.marks) >= MOST_MARKS:
            del self.marks[::2]
            self.mark_every *= 2

    @property
    def reports(self) -> bool:
        """Whether there is something to tell of the tokens that it reads."""
        return self.tells_read and bool(self.tokens) and (self.wanted.before or self.wanted.after)

    @property
    def numbers_each(self) -> int:
        """How many numbers it tells of a token, about: a measure of the memory that its events take."""
        wanted = self.wanted
        layers = self.model.gate_layers.values() if wanted.gates else ()
        gates = sum(min(channels, wanted.gates) for channels in layers)  # two bytes each
        return 1 + wanted.alternatives + wanted.answers + gates // 64

    @property
    def to_read(self) -> list[int]:
        """The tokens that stand between the stream's state and its last token, which the first step reads."""
        return [*self.place.unread, *self.tokens][:-1]

    @property
    def n_left(self) -> int:
        """How many tokens are left to read."""
        return max(0, len(self.place.unread) + len(self.tokens) - 1 - self.n_read)


class Row:
    """One continuation of a turn, a row of the batch that writes.

    Args:
        turn: it belongs to.
        choice: its number in the turn.
        place: where it begins; its state moves into the batch.
    """

    def __init__(self, turn: Turn, choice: int, place: Place) -> None:
        self.turn, self.choice = turn, choice
        config = turn.configs[choice]
        self.generation = Generation(config)
        self.recent, self.n_tokens = place.recent, place.n_tokens
        tokenizer = turn.model.tokenizer
        self.text = None if tokenizer is None else GeneratedText(tokenizer, place.recent, config.stop)
        self.reason: str | None = None

    def place(self, state: Any) -> Place:
        """Where it stands, with its state."""
        return Place(state, self.recent, self.n_tokens)

    def take(self, token: int) -> str:
        """Append a token that was chosen; give the text that it settles."""
        self.generation.count(token)
        self.recent, self.n_tokens = (*self.recent, token)[-64:], self.n_tokens + 1
        text = str(token) if self.text is None else self.text.add(token)
        if self.text is not None and self.text.is_over:
            self.reason = "stop"
        elif self.generation.is_over:
            self.reason = "length" if self.generation.n_left == 0 else "stop"
        return text

    def rest(self) -> str:
        """The text that is still held back."""
        return "" if self.text is None else self.text.flush()
