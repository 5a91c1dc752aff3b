"""A request to a stream: tokens to read, tokens to write, and the events that it leads to."""

import base64
import math
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recurra.analysis.gates import record_gates
from recurra.generation.generating import Generation, GenerationConfig
from recurra.generation.text import GeneratedText
from recurra.serving.model import Place, ServedModel


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


def shares(logits: Tensor, token: int | None, count: int) -> tuple[float | None, tuple[Share, ...]]:
    """Give the log-probability of a token, and the likeliest outputs with theirs."""
    logprobs = logits.float().log_softmax(-1)
    likeliest: tuple[Share, ...] = ()
    if count:
        top = logprobs.topk(min(count, len(logprobs)))
        likeliest = tuple(map(Share, top.indices.tolist(), top.values.tolist()))
    return None if token is None else float(logprobs[token]), likeliest


def gates_of(model: ServedModel, tokens: list[int], state: Any, channels: int) -> list[dict[str, Any]]:
    """Give the transitions with which a model reads tokens, one entry for each.

    An entry has `layers`, and `magnitudes` and `phases`, one text for each layer: base64 of a byte for each of at most
    `channels` evenly spaced channels. |a| is byte / 255; the phase is byte / 256 of a turn, from 0.

    Args:
        model: one that has transitions.
        tokens: what it reads.
        state: the state before the first of them.
        channels: of each layer, at most.
    """
    record = record_gates(model.plain, torch.tensor([tokens]), state)
    told = [number for number, layer in enumerate(record.layers) if layer in model.gate_layers]
    magnitudes = [_bytes((255 * record.magnitudes[number][0]).round().clamp(0, 255), channels) for number in told]
    phases = [_bytes((256 * record.phases[number][0] / (2 * math.pi)).round() % 256, channels) for number in told]
    return [
        {
            "layers": [record.layers[number] for number in told],
            "magnitudes": [part[step] for part in magnitudes],
            "phases": [part[step] for part in phases],
        }
        for step in range(len(tokens))
    ]


def _bytes(values: Tensor, channels: int) -> list[str]:
    """Evenly spaced channels of (L, channels), as base64 for each step."""
    width = values.shape[-1]
    chosen = torch.linspace(0, width - 1, min(width, channels)).round().long()
    return [base64.b64encode(bytes(row)).decode() for row in values[:, chosen].to(torch.uint8).tolist()]


class ReadReport:
    """Makes the events of a turn's tokens as they are read, piece by piece.

    A token's surprise comes from the logits in front of it, everything else from reading it. So the logits after the
    last token of a piece are kept for the next one.

    Args:
        turn: reads at least one token.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._number = 0  # of the token that is told next
        self._before: Tensor | None = None
        self._text = turn.model.pieces(turn.place.recent)

    def piece(self, read: list[int], hidden: Tensor, state: Any) -> list[TokenEvent]:
        """Tell about a piece of `turn.to_read`: the tokens, what the head reads after each, the state before them."""
        turn, wanted = self._turn, self._turn.wanted
        logits = turn.model.head(hidden) if wanted.before or wanted.answers else None
        gates = gates_of(turn.model, read, state, wanted.gates) if wanted.gates else None
        events = []
        for step in range(len(read)):
            after = None if logits is None else logits[step]
            if turn.n_read + step >= len(turn.place.unread):  # the stream's own last token was told when it came
                events.append(self._told(after, None if gates is None else gates[step]))
            self._before = after
        return events

    def last(self, state: Any) -> TokenEvent:
        """Tell about the last token, which the stream does not read yet, from the state before it."""
        turn, token = self._turn, self._turn.tokens[-1]
        after, gates = None, None
        if turn.wanted.answers:
            after = turn.model.head(turn.model.read(torch.tensor([[token]]), state)[0])[0, -1]
        if turn.wanted.gates:
            (gates,) = gates_of(turn.model, [token], state, turn.wanted.gates)
        return self._told(after, gates)

    def _told(self, after: Tensor | None, gates: Any) -> TokenEvent:
        turn, wanted = self._turn, self._turn.wanted
        token = turn.tokens[self._number]
        self._number += 1
        logprob: float | None = None
        alternatives: tuple[Share, ...] = ()
        if wanted.before and self._before is not None and turn.model.predicts_tokens:
            logprob, alternatives = shares(self._before, token, wanted.alternatives)
        answers = shares(after, None, wanted.answers)[1] if wanted.answers and after is not None else ()
        return TokenEvent(0, token, self._text(token), True, logprob, alternatives, answers, gates)
