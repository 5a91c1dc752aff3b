"""What the bodies of requests have in common: settings for the choice of tokens, texts to stop at, limits."""

import asyncio
from typing import Protocol

from recurra.checks import sentence
from recurra.generation.sampling import SamplingConfig
from recurra.serving.errors import ApiError
from recurra.serving.served_model import ServedModel
from recurra.serving.service import Service
from recurra.serving.turns import Turn

MOST_TOLD = 500_000
"""What an answer that is not a stream may tell, in numbers: it is in memory as a whole."""
_SHORT_TEXT = 2000


class Choices(Protocol):
    """The settings of a body."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float


def sampling_of(body: Choices) -> SamplingConfig:
    """Give the settings; at temperature 0 the others have no effect, and clients send them all the same."""
    if body.temperature == 0:
        return SamplingConfig(temperature=0.0, repetition_penalty=body.repetition_penalty)
    return SamplingConfig(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=None if body.top_p == 1 else body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
    )


def stops_of(model: ServedModel, stops: list[str]) -> tuple[str, ...]:
    """Give the texts to stop at. Raises ApiError for a model without text."""
    if stops and model.tokenizer is None:
        raise ApiError(400, f"stop has texts; expected none: {model.name} has no tokenizer", param="stop")
    return tuple(stops)


async def encoded(model: ServedModel, text: str, *, is_first: bool = True) -> list[int]:
    """Turn a text into tokens. A long one, which takes a tokenizer long, is left to another thread: streams go on."""
    if len(text) <= _SHORT_TEXT:
        return model.encode(text, is_first=is_first)
    return await asyncio.to_thread(model.encode, text, is_first=is_first)


def require_short(turn: Turn, n_choices: int = 1) -> None:
    """Refuse an answer in one piece that would tell too much for it. Raises ApiError.

    Args:
        turn: what is asked for.
        n_choices: continuations, each of which tells the tokens that are read, if any are told.
    """
    n_written = sum(config.max_tokens or 0 for config in turn.configs)
    n_tokens = n_written + (len(turn.tokens) * n_choices if turn.tells_read else 0)
    each = turn.numbers_each
    if n_tokens * each > MOST_TOLD:
        message = f"stream is false, for {n_tokens:,} tokens with {each} numbers each; expected {MOST_TOLD:,} in all"
        raise ApiError(400, f"{message}: stream the answer, or ask for fewer tokens or less of each", param="stream")


def allowed_tokens(service: Service, n_tokens: int, name: str) -> int:
    """Give the number back. Raises ApiError if it is beyond what a request may ask for."""
    most = service.settings.max_tokens
    if n_tokens > most:
        raise ApiError(400, sentence(name, n_tokens, f"at most {most}"), param=name, code="too_many_tokens")
    return n_tokens
