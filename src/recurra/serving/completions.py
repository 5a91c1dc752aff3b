"""/v1/models and /v1/completions as OpenAI's clients know them."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from itertools import takewhile
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from sse_starlette import EventSourceResponse

from recurra.checks import sentence
from recurra.data.text_start import start_of
from recurra.generation.generating import GenerationConfig
from recurra.serving.access import Caller, caller
from recurra.serving.answers import Answer, AnswerPiece, error_message
from recurra.serving.asking import allowed_tokens, encoded, require_short, sampling_of, stops_of
from recurra.serving.errors import ApiError
from recurra.serving.hearing import begun, event_stream, message, whole
from recurra.serving.openai_requests import Asking, CompletionBody
from recurra.serving.served_model import ServedModel
from recurra.serving.service import Service
from recurra.serving.turns import Event, Turn, Wanted
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
