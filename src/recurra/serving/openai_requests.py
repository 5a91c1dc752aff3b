"""The bodies of requests to OpenAI's endpoints, as far as they have a meaning here."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from recurra.serving.requests import Body, Text, Tokens

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
