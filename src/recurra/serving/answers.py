"""What a request without a session has come to: its continuations, piece by piece or whole."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from recurra.serving.errors import ApiError, error_body
from recurra.serving.hearing import message
from recurra.serving.served_model import ServedModel
from recurra.serving.turns import Event, TokenEvent, Turn

_REASONS = {"cancelled": "length", "timeout": "length", "read": "length"}
"""OpenAI's words for the ends that it does not know."""


@dataclass
class AnswerPiece:
    """A part of a continuation, or all of it."""

    choice: int
    text: str = ""
    tokens: list[TokenEvent] = field(default_factory=list)
    reason: str | None = None


class Answer:
    """Follows the events of a turn.

    Args:
        served: the model.
        turn: what runs.
        n_choices: how many continuations were asked for.
        echo: a text that each begins with.
        every_token: give a piece for every token, also where it settles no text.
    """

    def __init__(
        self, served: ServedModel, turn: Turn, n_choices: int, echo: str | None = None, every_token: bool = False
    ) -> None:
        self.served = served
        self._turn, self._n_choices, self._echo, self._every_token = turn, n_choices, echo, every_token
        self._n_written = 0
        self._read: list[TokenEvent] = []
        self._owed = echo is not None

    def pieces(self, events: list[Event]) -> list[AnswerPiece]:
        """Give the pieces of the next events; a prompt that is echoed is the first of each continuation."""
        pieces = []
        for event in events:
            if isinstance(event, TokenEvent) and event.was_read:
                self._read.append(event)
                continue
            if self._owed:
                self._owed = False
                pieces += [AnswerPiece(choice, self._echo or "", self._read) for choice in range(self._n_choices)]
            pieces += self._piece(event)
        return pieces

    def _piece(self, event: Event) -> list[AnswerPiece]:
        if isinstance(event, TokenEvent):
            self._n_written += 1
            return [AnswerPiece(event.choice, event.text, [event])] if event.text or self._every_token else []
        reason = _REASONS.get(event.reason, event.reason)
        choices = range(self._n_choices) if event.reason == "read" else (event.choice,)
        return [AnswerPiece(choice, event.text, [], reason) for choice in choices]

    async def whole(self, events: AsyncIterator[list[Event]]) -> list[AnswerPiece]:
        """Give each continuation as one piece. Raises ApiError if the model failed."""
        choices = [AnswerPiece(choice) for choice in range(self._n_choices)]
        async for some in events:
            for piece in self.pieces(some):
                one = choices[piece.choice]
                one.text += piece.text
                one.tokens += piece.tokens
                one.reason = piece.reason or one.reason
        if any(one.reason == "error" for one in choices):
            raise turn_failed()
        return choices

    def usage(self) -> dict[str, int]:
        """Count tokens."""
        read, written = len(self._turn.tokens), self._n_written
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def turn_failed(message: str = "the model failed on this request") -> ApiError:
    """A turn ended with an error."""
    return ApiError(500, message, code="turn_failed")


def error_message() -> bytes:
    """The same, where the answer has begun."""
    return message(json.dumps(error_body(turn_failed())))
