"""The bodies of requests, and what they have in common: sampling, texts to stop at, limits."""

import asyncio
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from recurra.checks import sentence
from recurra.generation.sampling import SamplingConfig
from recurra.serving.http import ApiError
from recurra.serving.model import ServedModel
from recurra.serving.requests import Turn
from recurra.serving.service import Service

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
MOST_TOKENS = 1_000_000
"""Of any list in a body; the server's own limit is lower."""

Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(max_length=MOST_TOKENS)]
Name = Annotated[str, Field(pattern=NAME)]
Position = Annotated[int, Field(ge=0, lt=2**53)]
Text = Annotated[str, Field(max_length=4 * 2**20)]


class Body(BaseModel):
    """A body whose unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class OpenBody(Body):
    """Open a session."""

    model: str | None = Field(None, max_length=200, description="which model; the first one served by default")
    name: Name | None = Field(None, description="what to call it; drawn at random by default")


class TellBody(Body):
    """What to tell about each token."""

    surprise: bool = Field(True, description="its log-probability")
    alternatives: int = Field(0, ge=0, le=20, description="how many of the likeliest tokens in its place")
    details: bool = Field(False, description="the transitions with which the model reads it")
    channels: int = Field(64, ge=1, le=4096, description="channels of a layer in the details, at most")


class FeedBody(TellBody):
    """Let a session read a text, or tokens."""

    text: Text | None = None
    tokens: Tokens | None = None
    answers: int = Field(0, ge=0, le=100, description="how many of the likeliest outputs after each token")
    stream: bool = False


class GenerateBody(TellBody):
    """Let a session write; with a text or tokens, it reads them first."""

    text: Text | None = None
    tokens: Tokens | None = None
    max_tokens: int = Field(100, ge=1, le=MOST_TOKENS)
    temperature: float = Field(1.0, ge=0, le=1000)
    top_k: int | None = Field(None, ge=1, le=2**31)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.001, le=1000)
    seed: int | None = Field(None, ge=0, lt=2**63, description="of the choices; drawn by default")
    stop: list[Annotated[str, Field(min_length=1, max_length=1000)]] = Field(default=[], max_length=16)
    stream: bool = True


class ForkBody(Body):
    """Open a session that continues from a place of another."""

    name: Name | None = None
    position: Position | None = Field(None, description="after so many tokens; the end by default")


class RewindBody(Body):
    """Go back to a place."""

    position: Position


class LabelBody(Body):
    """A copy of a session, kept under a label."""

    label: Name = "saved"


Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Nothing = Annotated[float, Field(ge=0, le=0)]


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Asking(Body):
    """What completions and chats have in common."""

    model: str = Field(max_length=200)
    temperature: float = Field(1.0, ge=0, le=1000)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1, le=2**31, description="not OpenAI's")
    min_p: float | None = Field(None, gt=0, le=1, description="not OpenAI's")
    repetition_penalty: float = Field(1.0, ge=0.001, le=1000, description="not OpenAI's")
    n: int = Field(1, ge=1, le=64)
    seed: int | None = Field(None, ge=0, lt=2**62)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=1000, description="no meaning here")
    presence_penalty: Nothing = 0
    frequency_penalty: Nothing = 0

    @property
    def stops(self) -> list[str]:
        """The texts to stop at."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class CompletionBody(Asking):
    """Continue a text or tokens."""

    prompt: Text | Tokens | Annotated[list[Text], Field(min_length=1, max_length=64)] = "\n"
    max_tokens: int = Field(16, ge=0, le=1_000_000)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False


class Message(Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class ChatBody(Asking):
    """Continue a chat."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]
    max_tokens: int | None = Field(None, ge=1, le=1_000_000)
    max_completion_tokens: int | None = Field(None, ge=1, le=1_000_000)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


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
