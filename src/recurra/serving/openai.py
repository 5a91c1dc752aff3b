"""OpenAI's endpoints: /v1/models, /v1/completions and /v1/chat/completions."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
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
from recurra.data.text_start import start_of
from recurra.generation.generating import GenerationConfig
from recurra.serving.bodies import (
    Asking,
    ChatBody,
    CompletionBody,
    Message,
    allowed_tokens,
    encoded,
    require_short,
    sampling_of,
    stops_of,
)
from recurra.serving.http import ApiError, error_body, number, turn_failed
from recurra.serving.model import ServedModel
from recurra.serving.requests import Event, TokenEvent, Turn, Wanted
from recurra.serving.service import Caller, Service, caller
from recurra.serving.streaming import begun, event_stream, message, whole

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


def error_message() -> bytes:
    """The same, where the answer has begun."""
    return message(json.dumps(error_body(turn_failed())))


router = APIRouter(prefix="/v1", tags=["openai"])

Asked = Annotated[Caller, Depends(caller)]


@router.get("/models")
async def models(asked: Asked) -> dict[str, Any]:
    """List the models."""
    service = asked.service
    data = [_model_json(service, model) for model in service.models.values()]
    return {"object": "list", "data": data}


@router.get("/models/{name}")
async def model(name: str, asked: Asked) -> dict[str, Any]:
    """Show a model."""
    return _model_json(asked.service, asked.service.model(name))


def _model_json(service: Service, one: ServedModel) -> dict[str, Any]:
    return {
        "id": one.name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "recurra",
        "recurra": one.description(),
    }


@router.post("/completions", response_model=None)
async def completions(request: Request, body: CompletionBody, asked: Asked) -> EventSourceResponse | Response:
    """Continue a text."""
    service = asked.service
    served = service.model(body.model)
    prompt = await _prompt(served, body)
    allowed_tokens(service, len(prompt), "prompt")
    wanted = Wanted() if body.logprobs is None else Wanted(True, body.logprobs)
    turn = turn_of(service, served, prompt, body, body.max_tokens, wanted)
    turn.tells_read = body.echo
    if not body.stream:
        require_short(turn, body.n)
    echo = _text_of_prompt(served, body, prompt) if body.echo else None
    answer = CompletionAnswer(Answer(served, turn, body.n, echo, body.logprobs is not None), body)
    heard = await begun(request, service.live.run(service.engine, turn))
    if body.stream:
        return event_stream(heard, answer.stream(heard))
    return await whole(request, heard, answer.whole(heard))


def _text_of_prompt(served: ServedModel, body: CompletionBody, prompt: list[int]) -> str:
    text_alone = served.tokenizer is None or not start_of(served.tokenizer)
    if isinstance(body.prompt, str) and text_alone:
        return body.prompt
    return " ".join(map(str, prompt)) if served.tokenizer is None else served.tokenizer.decode(prompt)


def turn_of(
    service: Service, served: ServedModel, prompt: list[int], body: Asking, max_tokens: int, wanted: Wanted
) -> Turn:
    """Make the turn of a request that has no session."""
    if not served.predicts_tokens:
        message = f"model is {served.name!r}, which predicts classes; expected one that predicts tokens"
        raise ApiError(400, message, code="cannot_generate", param="model")
    if body.n > service.settings.max_streams:
        raise ApiError(400, sentence("n", body.n, f"at most {service.settings.max_streams} at once"), param="n")
    seed = secrets.randbits(61) if body.seed is None else body.seed
    configs = [
        GenerationConfig(
            max_tokens=allowed_tokens(service, max_tokens, "max_tokens"),
            sampling=sampling_of(body),
            seed=seed + choice,
            stop=stops_of(served, body.stops),
        )
        for choice in range(body.n if max_tokens else 0)
    ]
    return Turn(served, served.start, prompt, configs, wanted, deadline=service.deadline())


async def _prompt(served: ServedModel, body: CompletionBody) -> list[int]:
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        if len(prompt) > 1:
            raise ApiError(
                400, f"prompt has {len(prompt)} texts; expected one: send a request for each", param="prompt"
            )
        prompt = prompt[0]
    tokens: list[int] = await encoded(served, prompt) if isinstance(prompt, str) else list(prompt)  # type: ignore[arg-type]
    served.require_tokens(tokens)
    return tokens or served.first_tokens()


class CompletionAnswer:
    """Turns events into completions, in pieces or as one.

    Args:
        answer: follows the events.
        body: what was asked.
    """

    def __init__(self, answer: Answer, body: CompletionBody) -> None:
        self._answer, self._body = answer, body
        self._frame = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": answer.served.name,
        }
        self._offsets = [0] * body.n

    async def whole(self, events: AsyncIterator[list[Event]]) -> dict[str, Any]:
        """Give the whole answer. Raises ApiError if the model failed."""
        choices = [self._choice(piece) for piece in await self._answer.whole(events)]
        return self._frame | {"choices": choices, "usage": self._answer.usage()}

    async def stream(self, events: AsyncIterator[list[Event]]) -> AsyncGenerator[bytes, None]:
        """Give the answer piece by piece; what the engine gave at once goes out at once."""
        head = json.dumps(self._frame)[:-1] + ', "choices": ['
        async for some in events:
            pieces = list(takewhile(lambda piece: piece.reason != "error", all_pieces := self._answer.pieces(some)))
            if pieces:
                yield b"".join([message(f"{head}{json.dumps(self._choice(piece))}]}}") for piece in pieces])
            if len(pieces) < len(all_pieces):
                yield error_message()
                return
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield message(json.dumps(self._frame | {"choices": [], "usage": self._answer.usage()}))
        yield message("[DONE]")

    def _choice(self, piece: AnswerPiece) -> dict[str, Any]:
        logprobs = None if self._body.logprobs is None else self._logprobs(piece)
        return {"index": piece.choice, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.reason}

    def _logprobs(self, piece: AnswerPiece) -> dict[str, Any]:
        text_of, offsets = self._answer.served.text_of, []
        for event in piece.tokens:
            offsets.append(self._offsets[piece.choice])
            self._offsets[piece.choice] += len(event.text)
        return {
            "tokens": [text_of(event.id) for event in piece.tokens],
            "token_logprobs": [number(event.logprob) for event in piece.tokens],
            "top_logprobs": [
                {text_of(share.id): number(share.logprob) for share in event.alternatives} or None
                for event in piece.tokens
            ],
            "text_offset": offsets,
        }


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
