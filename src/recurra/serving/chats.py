"""/v1/chat/completions: a chat as the text that the tokenizer's template makes of it."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import datetime
from itertools import takewhile
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from sse_starlette import EventSourceResponse

from recurra.checks import sentence
from recurra.serving.access import Caller, caller
from recurra.serving.answers import Answer, AnswerPiece, error_message
from recurra.serving.asking import allowed_tokens, encoded, require_short
from recurra.serving.completions import turn_of
from recurra.serving.errors import ApiError
from recurra.serving.hearing import begun, event_stream, message, whole
from recurra.serving.openai_requests import ChatBody, Message
from recurra.serving.served_model import ServedModel
from recurra.serving.turns import Event, TokenEvent, Wanted
from recurra.serving.wire import number

router = APIRouter(prefix="/v1", tags=["openai"])

DEFAULT_TOKENS = 1024
"""Tokens of an answer whose length the request does not say."""


@router.post("/chat/completions", response_model=None)
async def chat(
    request: Request, body: ChatBody, asked: Annotated[Caller, Depends(caller)]
) -> EventSourceResponse | Response:
    """Continue a chat."""
    service = asked.service
    served = service.model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(
            400, sentence("top_logprobs", body.top_logprobs, "logprobs true beside it"), param="top_logprobs"
        )
    prompt = await encoded(served, chat_text(served, body.messages))
    served.require_tokens(prompt)
    allowed_tokens(service, len(prompt), "messages")
    max_tokens = body.max_completion_tokens or body.max_tokens or min(DEFAULT_TOKENS, service.settings.max_tokens)
    wanted = Wanted(True, body.top_logprobs or 0) if body.logprobs else Wanted()
    turn = turn_of(service, served, prompt or served.first_tokens(), body, max_tokens, wanted)
    turn.tells_read = False
    if not body.stream:
        require_short(turn)
    answer = ChatAnswer(Answer(served, turn, body.n, every_token=body.logprobs), body)
    heard = await begun(request, service.live.run(service.engine, turn))
    if body.stream:
        return event_stream(heard, answer.stream(heard))
    return await whole(request, heard, answer.whole(heard))


def chat_text(served: ServedModel, messages: list[Message]) -> str:
    """Give the text that the model's template makes of a chat, up to where the answer begins.

    Raises:
        ApiError: the model has no template, or it refuses these messages.
    """
    if served.chat_template is None:
        message = f"{served.name} has no chat template; expected a model with one: use /v1/completions"
        raise ApiError(400, message, code="no_chat_template", param="model")
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    try:
        template = environment.from_string(served.chat_template)
        chat_ = [message.model_dump() for message in messages]
        return template.render(messages=chat_, add_generation_prompt=True, bos_token="", eos_token=_Unknown())
    except (TemplateError, TypeError, ValueError) as error:
        raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON as transformers does: Jinja's own filter escapes it for HTML, and sorts the keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, which marks what a model has written and changes no text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        """Give what is inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Unknown:
    """The token that ends a turn, which a run does not name."""

    def __str__(self) -> str:
        raise TemplateError("it uses eos_token, which a run does not name: write the token itself into the template")

    def __add__(self, other: Any) -> str:
        return str(self)

    __radd__ = __add__


class ChatAnswer:
    """Turns events into chat completions, in pieces or as one.

    Args:
        answer: follows the events.
        body: what was asked.
    """

    def __init__(self, answer: Answer, body: ChatBody) -> None:
        self._answer, self._body = answer, body
        self._frame = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": answer.served.name,
        }

    async def whole(self, events: AsyncIterator[list[Event]]) -> dict[str, Any]:
        """Give the whole answer. Raises ApiError if the model failed."""
        choices = [
            {
                "index": piece.choice,
                "message": {"role": "assistant", "content": piece.text},
                "logprobs": self._logprobs(piece.tokens),
                "finish_reason": piece.reason,
            }
            for piece in await self._answer.whole(events)
        ]
        return self._frame | {"object": "chat.completion", "choices": choices, "usage": self._answer.usage()}

    async def stream(self, events: AsyncIterator[list[Event]]) -> AsyncGenerator[bytes, None]:
        """Give the answer piece by piece; what the engine gave at once goes out at once."""
        frame = self._frame | {"object": "chat.completion.chunk"}
        for choice in range(self._body.n):
            yield self._piece(frame, choice, {"role": "assistant", "content": ""}, [], None)
        async for some in events:
            pieces = list(takewhile(lambda piece: piece.reason != "error", all_pieces := self._answer.pieces(some)))
            if pieces:
                yield b"".join([self._piece_of(frame, piece) for piece in pieces])
            if len(pieces) < len(all_pieces):
                yield error_message()
                return
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield message(json.dumps(frame | {"choices": [], "usage": self._answer.usage()}))
        yield message("[DONE]")

    def _piece_of(self, frame: dict[str, Any], piece: AnswerPiece) -> bytes:
        delta = {"content": piece.text} if piece.text else {}
        return self._piece(frame, piece.choice, delta, piece.tokens, piece.reason)

    def _piece(
        self, frame: dict[str, Any], choice: int, delta: dict[str, str], tokens: list[TokenEvent], reason: str | None
    ) -> bytes:
        one = {"index": choice, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": reason}
        return message(json.dumps(frame | {"choices": [one]}))

    def _logprobs(self, tokens: list[TokenEvent]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": [self._told(event) for event in tokens], "refusal": None}

    def _told(self, event: TokenEvent) -> dict[str, Any]:
        top = [self._share(share.id, share.logprob) for share in event.alternatives]
        return self._share(event.id, event.logprob) | {"top_logprobs": top}

    def _share(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._answer.served.text_of(token)
        return {"token": text, "logprob": number(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}
