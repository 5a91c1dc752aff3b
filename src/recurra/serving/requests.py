"""The bodies of requests to /v1/sessions."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

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
