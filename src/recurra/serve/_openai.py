"""OpenAI's endpoints, /v1/models, /v1/completions and /v1/chat/completions, and vLLM's /tokenize and /detokenize."""

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar

import fastapi
from fastapi import APIRouter, Response

from recurra.serve._bodies import (
    CompletionBody,
    DetokenizeBody,
    OpenAIBody,
    encode,
    require_collectable,
    require_generation,
    require_tokens,
)
from recurra.serve._chat_bodies import ChatBody, TokenizeBody
from recurra.serve._http import ApiError, refusal, request_failed
from recurra.serve._model import ServedModel
from recurra.serve._requests import EndEvent, Event, Request, TokenDetails, TokenEvent
from recurra.serve._service import By, Caller, Service
from recurra.serve._streaming import message, respond
from recurra.serve._tools import AnswerForm, AnswerReader, Arguments, Call, Piece, whole_calls
from recurra.streams.continuation import start_of

router = APIRouter(tags=["openai"])

_DEFAULT_TOKENS = 1024
"""Maximum number of tokens of a chat's answer, if the request sets none."""
_REASONS = {"cancelled": "length", "timeout": "length", "read": "length"}
"""OpenAI's words for reasons that it does not know."""


@router.get("/v1/models")
async def _models(by: By) -> dict[str, Any]:
    """List the models."""
    return {"object": "list", "data": [_model_json(by.service, model) for model in by.service.models.values()]}


@router.get("/v1/models/{name:path}")
async def _model(name: str, by: By) -> dict[str, Any]:
    """Show a model."""
    return _model_json(by.service, by.service.model(name))


def _model_json(service: Service, served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "recurra",
        "recurra": served.description(),
    }


@router.post("/v1/completions", response_model=None)
async def _completions(client: fastapi.Request, body: CompletionBody, by: By) -> Response:
    """Continue one text or several."""
    served = by.service.model(body.model)
    if body.best_of not in (None, body.n):
        raise refusal("best_of", body.best_of, f"{body.n}, as n is")
    prompts = body.prompts if not isinstance(body.prompts[0], str) else await encode(served, *body.prompts)
    by.service.require_allowed(prompt=sum(map(len, prompts)), max_tokens=body.max_tokens)
    details = TokenDetails() if body.logprobs is None else TokenDetails(True, body.logprobs)
    requests = await _requests(by, served, prompts, body, body.max_tokens, details)
    for request in requests:
        request.reports_prompt = body.echo
    return await _answer(client, by.service, _Completion(requests, body))


@router.post("/v1/chat/completions", response_model=None)
async def _chat(client: fastapi.Request, body: ChatBody, by: By) -> Response:
    """Continue a chat."""
    served = by.service.model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise refusal("top_logprobs", body.top_logprobs, "logprobs true beside it")
    text = body.chat_text(served, body.messages)
    form = body.form(served, text)
    (prompt,) = await encode(served, text)
    body.stop = [*body.stop, *served.chat_ends]
    max_tokens = body.max_completion_tokens or body.max_tokens or min(_DEFAULT_TOKENS, by.service.settings.max_tokens)
    by.service.require_allowed(messages=len(prompt), max_tokens=max_tokens)
    details = TokenDetails(True, body.top_logprobs or 0) if body.logprobs else TokenDetails()
    requests = await _requests(by, served, [prompt], body, max_tokens, details, form)
    return await _answer(client, by.service, _Chat(requests, body, form))


@router.post("/tokenize")
async def _tokenize(body: TokenizeBody, by: By) -> dict[str, Any]:
    """Turn a text, or a chat, into tokens, as completions read them."""
    served = by.service.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt and messages are both given, or neither; expected one of them", param="prompt")
    text = body.chat_text(served, body.messages or []) if body.prompt is None else body.prompt
    (tokens,) = await encode(served, text, is_first=body.add_special_tokens)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": by.service.settings.max_tokens}


@router.post("/detokenize")
async def _detokenize(body: DetokenizeBody, by: By) -> dict[str, str]:
    """Turn tokens into text."""
    served = by.service.model(body.model)
    by.service.require_allowed(tokens=len(body.tokens))
    require_tokens(served, tokens=body.tokens)
    return {"prompt": await asyncio.to_thread(served.decode, body.tokens)}


async def _requests(
    by: Caller,
    served: ServedModel,
    prompts: list[list[int]],
    body: OpenAIBody,
    max_tokens: int,
    details: TokenDetails,
    form: AnswerForm | None = None,
) -> list[Request]:
    """Make the requests of the prompts. Those without tokens begin as a text does."""
    require_generation(served)
    settings, deadline = by.service.settings, by.service.deadline()
    most = settings.share_of(settings.max_streams)
    if body.n * len(prompts) > most:
        several = ("prompt", f"a list of {len(prompts)}, with {body.n} texts for each")
        name, got = ("n", body.n) if len(prompts) == 1 else several
        raise refusal(name, got, f"at most {most} at once")
    constraint, made = await body.constraint(served, form), []
    for index, prompt in enumerate(prompts):
        require_tokens(served, prompt=prompt)
        configs = body.configs(served, max_tokens, body.n) if max_tokens else []
        request = Request(served, served.start, prompt or served.first_tokens(), configs, details, deadline=deadline)
        request.constraint, request.owner = constraint, by.owner
        request.reports_prompt, request.first_choice = False, index * body.n
        made.append(request)
    return made


async def _answer(client: fastapi.Request, service: Service, answer: "_Answer") -> Response:
    requests, body = answer.requests, answer.body
    if not body.stream:
        require_collectable(*requests, n_choices=body.n)
    return await respond(client, service.engine.run(*requests), body.stream, answer.stream, answer.collect)


@dataclass
class _Delta:
    """A part of one choice, or all of it."""

    choice: int
    text: str = ""
    tokens: list[TokenEvent] = field(default_factory=list)
    finish_reason: str | None = None
    reasoning: str = ""
    calls: list[Call | Arguments] = field(default_factory=list)


class _Answer:
    """Turns the events of requests, one for each prompt, into a response, as a stream of deltas or as one."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, requests: list[Request], body: Any, echoes: Sequence[str] = ()) -> None:
        self.requests, self.body, self._model = requests, body, requests[0].model
        self._frame = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self._model.name,
        }
        self._has_logprobs = requests[0].details.logprob
        self._n_choices = body.n * len(requests)
        self._n_written = 0
        self._read: list[list[TokenEvent]] = [[] for _ in requests]
        self._echoes = dict(enumerate(echoes))  # of prompts that are still to be echoed
        self._held: list[list[TokenEvent]] = [[] for _ in range(self._n_choices)]  # tokens of text that is held back
        self._n_characters = [0] * self._n_choices  # of the text that is not

    def choice(self, delta: _Delta) -> dict[str, Any]:
        raise NotImplementedError

    def chunk(self, delta: _Delta) -> dict[str, Any]:
        """Return the fields of a choice in a stream."""
        return self.choice(delta)

    def logprobs(self, delta: _Delta) -> dict[str, Any] | None:
        raise NotImplementedError

    def opening(self) -> list[_Delta]:
        return []

    async def collect(self, events: AsyncIterator[list[Event]]) -> dict[str, Any]:
        choices = [_Delta(index) for index in range(self._n_choices)]
        async for some in events:
            for delta in self._deltas(some):
                choice = choices[delta.choice]
                choice.text += delta.text
                choice.reasoning += delta.reasoning
                choice.calls += delta.calls
                choice.tokens += delta.tokens
                choice.finish_reason = delta.finish_reason or choice.finish_reason
        if any(choice.finish_reason == "error" for choice in choices):
            raise request_failed()
        shown = [self._json(choice, self.choice(choice)) for choice in choices]
        return self._frame | {"object": self.kind, "choices": shown, "usage": self._usage()}

    async def stream(self, events: AsyncIterator[list[Event]]) -> AsyncGenerator[bytes, None]:
        """Yield the response in messages; what the engine reports at once goes out at once."""
        frame = self._frame | {"object": self.chunk_kind} | ({"usage": None} if self.body.wants_usage else {})
        head = json.dumps(frame)[:-1] + ', "choices": ['

        def encoded(deltas: list[_Delta]) -> bytes:
            return b"".join(
                [message(f"{head}{json.dumps(self._json(delta, self.chunk(delta)))}]}}") for delta in deltas]
            )

        if opening := self.opening():
            yield encoded(opening)
        async for some in events:
            deltas = self._deltas(some)
            good = list(takewhile(lambda delta: delta.finish_reason != "error", deltas))
            if good:
                yield encoded(good)
            if len(good) < len(deltas):
                yield message(json.dumps(request_failed().body()))
                return
        if self.body.wants_usage:
            yield message(json.dumps(frame | {"choices": [], "usage": self._usage()}))
        yield message("[DONE]")

    def _json(self, delta: _Delta, fields: dict[str, Any]) -> dict[str, Any]:
        logprobs = self.logprobs(delta) if self._has_logprobs else None
        return {"index": delta.choice, **fields, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _deltas(self, events: list[Event]) -> list[_Delta]:
        """Return the deltas of the next events; an echoed prompt is the first of every choice."""
        deltas = []
        for event in events:
            prompt = event.choice // self.body.n
            choices = range(prompt * self.body.n, (prompt + 1) * self.body.n)
            if isinstance(event, TokenEvent) and event.was_read:
                self._read[prompt].append(event)
                continue
            if (echo := self._echoes.pop(prompt, None)) is not None:
                deltas += [_Delta(choice, echo, self._read[prompt]) for choice in choices]
            tokens = self._settled(event) if self._has_logprobs else []
            if isinstance(event, EndEvent):
                reason = _REASONS.get(event.reason, event.reason)
                ended = choices if event.reason == "read" else (event.choice,)
                deltas += [_Delta(choice, event.text, tokens, reason) for choice in ended]
                continue
            self._n_written += 1
            if event.text or tokens:
                deltas.append(_Delta(event.choice, event.text, tokens))
        return deltas

    def _settled(self, event: Event) -> list[TokenEvent]:
        """Return the tokens whose text begins before the end of what is settled; those of a stop text never do."""
        held = self._held[event.choice]
        if isinstance(event, TokenEvent):
            held.append(event)
        self._n_characters[event.choice] += len(event.text)
        n = sum(token.offset < self._n_characters[event.choice] for token in held)
        if isinstance(event, EndEvent) and event.reason != "stop":
            n = len(held)
        self._held[event.choice] = held[n:]
        return held[:n]

    def _usage(self) -> dict[str, Any]:
        read, written = sum(len(request.tokens) for request in self.requests), self._n_written
        counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return counts | {"prompt_tokens_details": {"cached_tokens": sum(one.n_cached for one in self.requests)}}


class _Completion(_Answer):
    """The response of /v1/completions."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, requests: list[Request], body: CompletionBody) -> None:
        echoes = list(map(_echoed, requests, body.prompts)) if body.echo else []
        super().__init__(requests, body, echoes)
        self._n_echoed = list(map(len, echoes)) or [0] * len(requests)

    def choice(self, delta: _Delta) -> dict[str, Any]:
        return {"text": delta.text}

    def logprobs(self, delta: _Delta) -> dict[str, Any]:
        text_of, offsets, end = self._model.text_of, [], 0
        for event in delta.tokens:
            offsets.append(end if event.was_read else self._n_echoed[delta.choice // self.body.n] + event.offset)
            end += len(event.text)
        return {
            "tokens": [text_of(event.id) for event in delta.tokens],
            "token_logprobs": [number(event.logprob) for event in delta.tokens],
            "top_logprobs": [
                {text_of(one.id): number(one.logprob) for one in event.alternatives} or None for event in delta.tokens
            ],
            "text_offset": offsets,
        }


def _echoed(request: Request, prompt: str | list[int]) -> str:
    tokenizer = request.model.tokenizer
    if isinstance(prompt, str) and (tokenizer is None or not start_of(tokenizer)):
        return prompt
    return request.model.decode(request.tokens)


class _Chat(_Answer):
    """The response of /v1/chat/completions."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, requests: list[Request], body: ChatBody, form: AnswerForm) -> None:
        super().__init__(requests, body)
        self._readers = [] if form.is_plain else [AnswerReader(form) for _ in range(self._n_choices)]

    def choice(self, delta: _Delta) -> dict[str, Any]:
        beside = {"reasoning_content": delta.reasoning, "tool_calls": whole_calls(delta.calls)}
        beside = {name: value for name, value in beside.items() if value}
        return {"message": {"role": "assistant", "content": delta.text or (None if beside else ""), **beside}}

    def chunk(self, delta: _Delta) -> dict[str, Any]:
        """Return what is new of the message; a delta without anything is the opening."""
        if delta == _Delta(delta.choice):
            return {"delta": {"role": "assistant", "content": ""}}
        calls = [part.delta() for part in delta.calls]
        fields = {"content": delta.text, "reasoning_content": delta.reasoning, "tool_calls": calls}
        return {"delta": {name: value for name, value in fields.items() if value}}

    def _deltas(self, events: list[Event]) -> list[_Delta]:
        deltas = super()._deltas(events)
        return [part for delta in deltas for part in self._parts(delta)] if self._readers else deltas

    def _parts(self, delta: _Delta) -> list[_Delta]:
        """Take a delta apart: its tokens come first, its end last."""
        choice, reader = delta.choice, self._readers[delta.choice]
        parts = [_Delta(choice, tokens=delta.tokens)] if delta.tokens else []
        for piece in reader.add(delta.text, is_last=delta.finish_reason is not None):
            if not isinstance(piece, Piece):
                parts.append(_Delta(choice, calls=[piece]))
            elif piece.is_reasoning:
                parts.append(_Delta(choice, reasoning=piece.text))
            else:
                parts.append(_Delta(choice, piece.text))
        if delta.finish_reason is not None:
            reason = "tool_calls" if delta.finish_reason == "stop" and reader.n_calls else delta.finish_reason
            parts.append(_Delta(choice, finish_reason=reason))
        return parts

    def opening(self) -> list[_Delta]:
        return [_Delta(choice) for choice in range(self._n_choices)]

    def logprobs(self, delta: _Delta) -> dict[str, Any]:
        content = [
            self._logprob(event.id, event.logprob)
            | {"top_logprobs": [self._logprob(one.id, one.logprob) for one in event.alternatives]}
            for event in delta.tokens
        ]
        return {"content": content, "refusal": None}

    def _logprob(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._model.text_of(token)
        return {"token": text, "logprob": number(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


def number(value: float | None) -> float | None:
    """Return a log-probability that JSON can hold: rounded, None for NaN, and -9999 for minus infinity, as OpenAI's."""
    if value is None or math.isnan(value):
        return None
    return round(value, 5) if math.isfinite(value) else -9999.0
