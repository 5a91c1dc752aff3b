"""The bodies of requests, checked by pydantic, and the checks of them that need the model or the server's limits."""

import asyncio
import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from recurra.checks import sentence
from recurra.serve._http import ApiError
from recurra.serve._model import ServedModel
from recurra.serve._requests import Request, TokenDetails
from recurra.streams.continuation import GenerationConfig
from recurra.streams.sampling import SamplingConfig

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_MOST_TOKENS = 1_000_000
"""Of any list in a body; the server's own limit is lower."""
_MOST_NUMBERS = 500_000
"""Maximum number of values in a response that is not streamed, which is built in memory."""
_SHORT_TEXT = 2000


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else [] if stop is None else stop


_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Tokens = Annotated[list[_Token], Field(max_length=_MOST_TOKENS)]
_MaxTokens = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]
_Name = Annotated[str, Field(pattern=NAME)]
_Position = Annotated[int, Field(ge=0, lt=2**53)]
_Text = Annotated[str, Field(max_length=4 * 2**20)]
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
_Stops = Annotated[list[_Stop], Field(max_length=16), BeforeValidator(_as_list)]
_Zero = Annotated[float, Field(ge=0, le=0)]


class _Body(BaseModel):
    """A body whose unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _SamplingBody(_Body):
    """How tokens are chosen."""

    temperature: float = Field(1.0, ge=0, le=1000)
    top_k: int | None = Field(None, ge=1, le=2**31)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.001, le=1000)
    seed: int | None = Field(None, ge=0, lt=2**63, description="drawn at random by default")
    stop: _Stops = []

    def configs(self, model: ServedModel, max_tokens: int, n: int = 1) -> list[GenerationConfig]:
        if self.stop and model.tokenizer is None:
            raise ApiError(400, f"stop has texts; expected none: {model.name} has no tokenizer", param="stop")
        seed = secrets.randbits(61) if self.seed is None else self.seed
        sampling = self._sampling()
        return [
            GenerationConfig(max_tokens=max_tokens, sampling=sampling, seed=seed + choice, stop=self.stop)
            for choice in range(n)
        ]

    def _sampling(self) -> SamplingConfig:
        if self.temperature == 0:  # the others have no effect then, and clients send them all the same
            return SamplingConfig(temperature=0.0, repetition_penalty=self.repetition_penalty)
        return SamplingConfig(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=None if self.top_p == 1 else self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )


class _StreamOptions(_Body):
    """What a stream reports beside the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class OpenAIBody(_SamplingBody):
    """The common fields of completions and chats."""

    model: str = Field(max_length=200)
    n: int = Field(1, ge=1, le=64)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    user: str | None = Field(None, max_length=1000, description="no meaning here")
    presence_penalty: _Zero = 0
    frequency_penalty: _Zero = 0

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(OpenAIBody):
    """Continue a text or tokens."""

    prompt: _Text | _Tokens | Annotated[list[_Text], Field(min_length=1, max_length=64)] = "\n"
    max_tokens: int = Field(16, ge=0, le=_MOST_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False


class _Message(_Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: _Text


class ChatBody(OpenAIBody):
    """Continue a chat."""

    messages: Annotated[list[_Message], Field(min_length=1, max_length=1000)]
    max_tokens: _MaxTokens | None = None
    max_completion_tokens: _MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


class OpenBody(_Body):
    """Open a session."""

    model: str | None = Field(None, max_length=200, description="which model; the first one served by default")
    name: _Name | None = Field(None, description="drawn at random by default")


class DetailsBody(_Body):
    """What to read first, and what to report about each token."""

    text: _Text | None = None
    tokens: _Tokens | None = None
    surprise: bool = Field(True, description="its log-probability")
    alternatives: int = Field(0, ge=0, le=20, description="this many of the likeliest tokens in its place")
    details: bool = Field(False, description="the transitions with which the model reads it")
    channels: int = Field(64, ge=1, le=4096, description="maximum number of channels of a layer in the details")

    def token_details(self, model: ServedModel, answers: int = 0) -> TokenDetails:
        if self.details and not model.gate_layers:
            raise ApiError(400, f"details is true; expected false: {model.name} has no transitions", param="details")
        return TokenDetails(self.surprise, self.alternatives, answers, self.channels if self.details else 0)


class FeedBody(DetailsBody):
    """Let a session read a text, or tokens."""

    answers: int = Field(0, ge=0, le=100, description="this many of the likeliest outputs after each token")
    stream: bool = False


class GenerateBody(DetailsBody, _SamplingBody):
    """Let a session write; with a text or tokens, it reads them first."""

    max_tokens: _MaxTokens = 100
    stream: bool = True


class ForkBody(_Body):
    """Open a session that continues from a position of another."""

    name: _Name | None = None
    position: _Position | None = Field(None, description="after this many tokens; the end by default")


class RewindBody(_Body):
    """Go back to a position."""

    position: _Position


async def encode(model: ServedModel, text: str, *, is_first: bool = True) -> list[int]:
    """Encode a text. A long one takes time and is left to another thread, so that streams continue."""
    if len(text) <= _SHORT_TEXT:
        return model.encode(text, is_first=is_first)
    return await asyncio.to_thread(model.encode, text, is_first=is_first)


def require_tokens(model: ServedModel, tokens: list[int]) -> None:
    wrong = next((token for token in tokens if not 0 <= token < model.vocabulary), None)
    if wrong is not None:
        raise ApiError(400, sentence("tokens", f"a list with {wrong}", f"tokens from 0 to {model.vocabulary - 1}"))


def require_generation(model: ServedModel) -> None:
    if not model.predicts_tokens:
        message = f"model is {model.name!r}, which predicts classes; expected one that predicts tokens"
        raise ApiError(400, message, code="cannot_generate", param="model")


def require_collectable(request: Request, n_choices: int = 1) -> None:
    """Raise ApiError if the response is too large to be sent in one piece.

    Each of `n_choices` continuations repeats what is reported about the tokens that are read.
    """
    n_written = sum(config.max_tokens or 0 for config in request.configs)
    n_tokens = n_written + (len(request.tokens) * n_choices if request.reports_prompt else 0)
    each = request.numbers_per_token
    if n_tokens * each > _MOST_NUMBERS:
        message = (
            f"stream is false, for {n_tokens:,} tokens with {each} numbers each; expected {_MOST_NUMBERS:,} in all"
        )
        raise ApiError(400, f"{message}: stream the answer, or ask for fewer tokens or less of each", param="stream")
