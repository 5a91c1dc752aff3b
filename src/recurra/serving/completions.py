"""/v1/models and /v1/completions as OpenAI's clients know them."""

import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from sse_starlette import EventSourceResponse

from recurra.generation.generating import GenerationConfig
from recurra.serving.access import Caller, caller
from recurra.serving.asking import allowed_tokens, sampling_of, stops_of
from recurra.serving.errors import ApiError
from recurra.serving.openai_requests import Asking, CompletionBody
from recurra.serving.served_model import ServedModel
from recurra.serving.service import Service
from recurra.serving.turns import Event, TokenEvent, Turn, Wanted
from recurra.serving.wire import number

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
async def completions(body: CompletionBody, asked: Asked) -> EventSourceResponse | dict[str, Any]:
    """Continue a text."""
    service = asked.service
    served = service.model(body.model)
    prompt = _prompt(served, body)
    allowed_tokens(service, len(prompt), "prompt")
    wanted = Wanted() if body.logprobs is None else Wanted(True, body.logprobs)
    turn = turn_of(service, served, prompt, body, body.max_tokens, wanted)
    answer = CompletionAnswer(served, body, turn)
    events = service.live.run(service.engine, turn)
    first = await anext(events)
    if body.stream:
        return EventSourceResponse(answer.stream(first, events))
    return await answer.whole(first, events)


def turn_of(
    service: Service, served: ServedModel, prompt: list[int], body: Asking, max_tokens: int, wanted: Wanted
) -> Turn:
    """Make the turn of a request that has no session."""
    if not served.predicts_tokens:
        message = f"model is {served.name!r}, which predicts classes; expected one that predicts tokens"
        raise ApiError(400, message, code="cannot_generate", param="model")
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


def _prompt(served: ServedModel, body: CompletionBody) -> list[int]:
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        if len(prompt) > 1:
            raise ApiError(
                400, f"prompt has {len(prompt)} texts; expected one: send a request for each", param="prompt"
            )
        prompt = prompt[0]
    tokens: list[int] = served.encode(prompt) if isinstance(prompt, str) else list(prompt)  # type: ignore[arg-type]
    served.require_tokens(tokens)
    return tokens or served.first_tokens()


@dataclass
class _Choice:
    """What a continuation has come to."""

    text: str = ""
    tokens: list[TokenEvent] = field(default_factory=list)
    reason: str | None = None


class CompletionAnswer:
    """Turns events into completions, in pieces or as one.

    Args:
        served: the model.
        body: what was asked.
        turn: what runs.
    """

    def __init__(self, served: ServedModel, body: CompletionBody, turn: Turn) -> None:
        self._served, self._body, self._turn = served, body, turn
        self._frame = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }
        self._offsets = [0] * body.n
        self._n_written = 0
        self._prompt: list[TokenEvent] = []

    async def whole(self, first: list[Event], rest: AsyncIterator[list[Event]]) -> dict[str, Any]:
        """Give the whole answer."""
        choices = [_Choice() for _ in range(self._body.n)]
        async for number_, text, tokens, reason in self._pieces(first, rest):
            choices[number_].text += text
            choices[number_].tokens += tokens
            choices[number_].reason = reason or choices[number_].reason
        if any(choice.reason == "error" for choice in choices):
            raise ApiError(500, "the model failed on this request", code="turn_failed")
        listed = [
            self._choice(number_, choice.text, choice.tokens, choice.reason) for number_, choice in enumerate(choices)
        ]
        return self._frame | {"choices": listed, "usage": self._usage()}

    async def stream(self, first: list[Event], rest: AsyncIterator[list[Event]]) -> AsyncIterator[dict[str, str]]:
        """Give the answer piece by piece."""
        async for number_, text, tokens, reason in self._pieces(first, rest):
            if reason == "error":
                message = "the model failed on this request"
                yield {
                    "data": json.dumps(
                        {"error": {"message": message, "type": "server_error", "param": None, "code": "turn_failed"}}
                    )
                }
                return
            yield {"data": json.dumps(self._frame | {"choices": [self._choice(number_, text, tokens, reason)]})}
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {"data": json.dumps(self._frame | {"choices": [], "usage": self._usage()})}
        yield {"data": "[DONE]"}

    async def _pieces(
        self, first: list[Event], rest: AsyncIterator[list[Event]]
    ) -> AsyncIterator[tuple[int, str, list[TokenEvent], str | None]]:
        """Give (choice, text, tokens, reason); the prompt first where it is echoed."""
        some: list[Event] | None = first
        echoed = not self._body.echo
        while some is not None:
            for event in some:
                if isinstance(event, TokenEvent) and event.was_read:
                    self._prompt.append(event)
                    continue
                if not echoed:
                    echoed = True
                    for choice in range(self._body.n):
                        yield choice, self._prompt_text(), self._prompt, None
                if isinstance(event, TokenEvent):
                    self._n_written += 1
                    if event.text or self._body.logprobs is not None:
                        yield event.choice, event.text, [event], None
                elif event.reason == "read":
                    for choice in range(self._body.n):
                        yield choice, "", [], "length"
                else:
                    yield event.choice, event.text, [], _REASONS.get(event.reason, event.reason)
            some = await anext(rest, None)

    def _prompt_text(self) -> str:
        if isinstance(self._body.prompt, str):
            return self._body.prompt
        if self._served.tokenizer is None:
            return " ".join(map(str, self._turn.tokens))
        return self._served.tokenizer.decode(self._turn.tokens)

    def _choice(self, number_: int, text: str, tokens: list[TokenEvent], reason: str | None) -> dict[str, Any]:
        logprobs = None if self._body.logprobs is None else self._logprobs(number_, tokens)
        return {"index": number_, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, number_: int, tokens: list[TokenEvent]) -> dict[str, Any]:
        offsets = []
        for event in tokens:
            offsets.append(self._offsets[number_])
            self._offsets[number_] += len(event.text)
        return {
            "tokens": [self._served.text_of(event.id) for event in tokens],
            "token_logprobs": [number(event.logprob) for event in tokens],
            "top_logprobs": [
                {self._served.text_of(share.id): number(share.logprob) for share in event.alternatives} or None
                for event in tokens
            ],
            "text_offset": offsets,
        }

    def _usage(self) -> dict[str, int]:
        n_prompt = len(self._turn.tokens)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": self._n_written,
            "total_tokens": n_prompt + self._n_written,
        }


_REASONS = {"cancelled": "stop", "timeout": "length"}
