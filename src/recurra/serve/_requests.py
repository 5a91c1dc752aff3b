"""A request to a stream, which only the engine changes once it is submitted, and the events that report on it."""

import base64
import math
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recurra.analysis.gates import record_gates
from recurra.models.shell import evenly_spaced
from recurra.serve._grammar import Constraint
from recurra.serve._model import PausedStream, ServedModel
from recurra.streams.continuation import GeneratedText, Generation, GenerationConfig

SHORTEST_CHUNK, LONGEST_CHUNK = 16, 256
"""Tokens that are read at once: fewer cost too much per token, more delay the requests that arrive meanwhile. What is
shorter is a whole prompt, or the rest of one after a mark (`Request.marks`)."""
_MOST_CHECKPOINTS = 64
"""Checkpoints that a request keeps while it runs."""


class TokenDetails(NamedTuple):
    """Which details of a token to report."""

    logprob: bool = False
    alternatives: int = 0  # this many of the likeliest tokens in its place
    answers: int = 0  # for tokens that are read, this many of the likeliest outputs after each
    gates: int = 0  # the transitions with which the model reads it, for at most this many channels of a layer

    @property
    def of_prediction(self) -> bool:
        return self.logprob or self.alternatives > 0


_NO_DETAILS = TokenDetails()


class TokenLogprob(NamedTuple):
    """An output of the model and its log-probability in nats."""

    id: int
    logprob: float


class TokenEvent(NamedTuple):
    """A token that was read or written."""

    choice: int  # index of the continuation that it belongs to, or of the first one if it was read
    id: int
    text: str  # what it adds; "" inside a letter of several bytes, or while a stop text may begin
    was_read: bool = False
    logprob: float | None = None
    alternatives: tuple[TokenLogprob, ...] = ()
    answers: tuple[TokenLogprob, ...] = ()
    gates: Any = None
    offset: int = 0  # of a token that was written: where its text begins in the continuation, in characters


class EndEvent(NamedTuple):
    """The end of one continuation, or of a request that only reads."""

    choice: int
    reason: str  # "stop", "length", "read", "cancelled", "timeout" or "error"
    state: PausedStream
    text: str = ""  # that was held back
    message: str = ""  # of an error, and its code
    code: str = "turn_failed"


Event = TokenEvent | EndEvent


@dataclass(eq=False)
class Request:
    """Tokens for a stream to read, and any number of continuations to write after them."""

    model: ServedModel
    start: PausedStream
    tokens: list[int]
    configs: list[GenerationConfig]  # one for each continuation
    details: TokenDetails = _NO_DETAILS
    first_choice: int = 0  # index of the first continuation in events, which several requests may share
    reports_prompt: bool = True
    owner: str | None = None  # whose prefixes may be used, and are extended; None for nobody's
    is_background: bool = False  # reads only to extend the prefixes, and begins when there is nothing else to do
    checkpoint_every: int = 0  # tokens; 0 for never
    deadline: float = float("inf")  # on the clock of `time.monotonic`
    is_cancelled: bool = False
    n_read: int = 0
    prompt_state: Any = None  # the model's state after the `n_read` tokens of `to_read`; None before the first
    n_cached: int = 0  # tokens that did not have to be read
    marks: list[Any] = field(default_factory=list)  # nodes of the prefix cache ahead, each awaiting the state there
    waits_for: Any = None  # such a node, which another request is on its way to
    checkpoints: list[PausedStream] = field(default_factory=list)
    submitted: float = field(default_factory=time.monotonic)
    constraint: Constraint | None = None  # of each continuation, at its start

    @property
    def n_sequences(self) -> int:
        return max(1, len(self.configs))

    @property
    def to_read(self) -> list[int]:
        """The stream's unread token and the new ones but the last, which is left unread."""
        return [*self.start.unread, *self.tokens][:-1]

    @property
    def n_left(self) -> int:
        """The number of tokens of `to_read` that are left."""
        return max(0, len(self.start.unread) + len(self.tokens) - 1 - self.n_read)

    @property
    def n_next(self) -> int:
        """The number of tokens up to the next mark, or to the end."""
        return self.marks[0].end - self.n_read if self.marks else self.n_left

    @property
    def is_waiting(self) -> bool:
        return self.waits_for is not None and self.waits_for.reader is not None

    @property
    def takes_prefix(self) -> bool:
        """Whether it may begin with tokens that it does not read."""
        return self.owner is not None and not self.is_reported and not self.start.position

    @property
    def is_reported(self) -> bool:
        return self.reports_prompt and bool(self.tokens) and any(self.details)

    @cached_property
    def prompt_report(self) -> "_PromptReport":
        return _PromptReport(self)

    @property
    def numbers_per_token(self) -> int:
        """How many numbers an event has, roughly: a measure of its memory."""
        channels = self.model.gate_layers.values() if self.details.gates else ()
        n_gates = sum(min(n, self.details.gates) for n in channels)  # two bytes each
        return 1 + self.details.alternatives + self.details.answers + n_gates // 64

    def interruption(self, now: float) -> str | None:
        if self.is_cancelled:
            return "cancelled"
        return "timeout" if now > self.deadline else None

    def add_checkpoint(self, state: PausedStream) -> None:
        """Keep a state; if there are too many, drop every other one and make the next ones half as frequent."""
        self.checkpoints.append(state)
        if len(self.checkpoints) >= _MOST_CHECKPOINTS:
            del self.checkpoints[::2]
            self.checkpoint_every *= 2


class Sequence:
    """One continuation of a request, while it is written in a batch, which holds its model state."""

    def __init__(self, request: Request, choice: int, start: PausedStream) -> None:
        self.request, self.choice = request, request.first_choice + choice
        config = request.configs[choice]
        self.generation = Generation(config)
        self.stream = start._replace(model_state=None)
        self.written: list[int] = []
        tokenizer = request.model.tokenizer
        self._text = None if tokenizer is None else GeneratedText(tokenizer, start.recent, config.stop)
        self.constraint = None if request.constraint is None else request.constraint.copy()
        self.finish_reason: str | None = None
        self.n_characters = 0  # of the text of all tokens so far

    def state(self, model_state: Any) -> PausedStream:
        return self.stream._replace(model_state=model_state)

    def append(self, token: int) -> str:
        self.generation.count(token)
        self.written.append(token)
        self.stream = self.stream.after((token,), None)
        text = str(token) if self._text is None else self._text.add(token)
        self.n_characters = self.n_characters + len(text) if self._text is None else self._text.n_characters
        if self.constraint is not None:
            self.constraint.advance(token)
        is_complete = self.constraint is not None and self.constraint.is_complete
        if is_complete or (self._text is not None and self._text.is_over):
            self.finish_reason = "stop"
        elif self.generation.is_over:
            self.finish_reason = "length" if self.generation.n_left == 0 else "stop"
        return text

    def flush(self) -> str:
        return "" if self._text is None else self._text.flush()


class _PromptReport:
    """Makes the events of the tokens that a request reads, chunk by chunk."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._n_reported = 0
        self._logits: Tensor | None = None  # before the token that is reported next, for its log-probability
        self._text = request.model.text_pieces(request.start.recent)

    def chunk(self, tokens: list[int], hidden: Tensor, state: Any) -> list[TokenEvent]:
        """Report the next tokens of `to_read`, given the head's inputs after each and the state before them."""
        request, details = self._request, self._request.details
        logits = request.model.head(hidden) if details.of_prediction or details.answers else None
        gates = gates_of(request.model, tokens, state, details.gates) if details.gates else None
        events = []
        for step in range(len(tokens)):
            after = None if logits is None else logits[step]
            if request.n_read + step >= len(request.start.unread):  # the unread token was reported when it came
                events.append(self._event(after, None if gates is None else gates[step]))
            self._logits = after
        return events

    def last(self, state: Any) -> TokenEvent:
        """Report the last token, which the stream does not read yet, given the state before it."""
        model, details, token = self._request.model, self._request.details, self._request.tokens[-1]
        after, gates = None, None
        if details.answers:
            after = model.head(model.read(torch.tensor([[token]]), [state])[0])[0, -1]
        if details.gates:
            (gates,) = gates_of(model, [token], state, details.gates)
        event = self._event(after, gates)
        self._logits = None  # a view of a whole chunk's
        return event

    def _event(self, after: Tensor | None, gates: Any) -> TokenEvent:
        request, details = self._request, self._request.details
        token = request.tokens[self._n_reported]
        self._n_reported += 1
        logprob: float | None = None
        alternatives: tuple[TokenLogprob, ...] = ()
        if details.of_prediction and self._logits is not None and request.model.predicts_tokens:
            logprob, alternatives = token_logprobs(self._logits, token, details.alternatives)
        answers = token_logprobs(after, None, details.answers)[1] if details.answers and after is not None else ()
        choice = request.first_choice
        return TokenEvent(choice, token, self._text(token), True, logprob, alternatives, answers, gates)


def token_logprobs(
    logits: Tensor, token: int | None, n_alternatives: int
) -> tuple[float | None, tuple[TokenLogprob, ...]]:
    logprobs = logits.float().log_softmax(-1)
    likeliest: tuple[TokenLogprob, ...] = ()
    if n_alternatives:
        top = logprobs.topk(min(n_alternatives, len(logprobs)))
        likeliest = tuple(map(TokenLogprob, top.indices.tolist(), top.values.tolist()))
    return None if token is None else float(logprobs[token]), likeliest


def gates_of(model: ServedModel, tokens: list[int], state: Any, channels: int) -> list[dict[str, Any]]:
    """Return the transitions with which a model reads tokens from a state, one entry for each token.

    An entry has `layers`, and `magnitudes` and `phases`, one string for each layer: base64 of a byte for each of at
    most `channels` evenly spaced channels. |a| is byte / 255; the phase is byte / 256 of a full turn, from 0.
    """
    record = record_gates(model.plain, torch.tensor([tokens]), state)
    magnitudes = [_base64((255 * one[0]).round().clamp(0, 255), channels) for one in record.magnitudes]
    phases = [_base64((256 * one[0] / (2 * math.pi)).round() % 256, channels) for one in record.phases]
    return [
        {
            "layers": list(record.layers),
            "magnitudes": [layer[step] for layer in magnitudes],
            "phases": [layer[step] for layer in phases],
        }
        for step in range(len(tokens))
    ]


def _base64(values: Tensor, channels: int) -> list[str]:
    chosen = values[:, evenly_spaced(values.shape[-1], channels)]
    return [base64.b64encode(bytes(step)).decode() for step in chosen.to(torch.uint8).tolist()]
