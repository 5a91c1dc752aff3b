"""The bodies of requests, and what is refused in them."""

import asyncio
import json
import re
import reprlib
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from recurra.checks import sentence
from recurra.serve._call_grammar import calls_grammar
from recurra.serve._grammar import Constraint, compile_grammar
from recurra.serve._http import ApiError, refusal
from recurra.serve._model import ServedModel
from recurra.serve._requests import Request, TokenDetails
from recurra.serve._schemas import require_finite
from recurra.serve._tools import AnswerForm
from recurra.streams.continuation import GenerationConfig
from recurra.streams.sampling import SamplingConfig

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_MOST_TOKENS = 1_000_000
"""Of any list in a body; the server's own limit is lower."""
_MOST_PROMPTS = 2048
"""Prompts of a request; with `n` texts for each, the server's own limit is lower."""
_MOST_NUMBERS = 500_000
"""Maximum number of values in a response that is not streamed, which is built in memory."""
_MOST_FIELDS = 1000
_SHORT_TEXT = 2000


def _as_list(stop: Any) -> list[Any]:
    """Return texts to stop at as a list, without empty ones."""
    return [text for text in (stop if isinstance(stop, list) else [stop]) if text not in (None, "")]


_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Tokens = Annotated[list[_Token], Field(max_length=_MOST_TOKENS)]
MaxTokens = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]
_Name = Annotated[str, Field(pattern=NAME)]
_Position = Annotated[int, Field(ge=0, lt=2**53)]
Text = Annotated[str, Field(max_length=4 * 2**20)]
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
_Stops = Annotated[list[_Stop], Field(max_length=16), BeforeValidator(_as_list)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TokenName = Annotated[int, Field(ge=0, lt=2**31, strict=False)]
"""A token as the key of an object, which JSON makes a string."""
_Bias = Annotated[float, Field(ge=-100, le=100)]


def _as_unicode(value: Any) -> Any:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a text with {error.object[error.start]!r}; expected Unicode: half a pair is none") from error
    except RecursionError as error:
        raise ValueError("nested too deeply; expected fewer levels") from error
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_as_unicode)]
"""Of anything, which pydantic does not look at."""

_ANYTHING = object()
_NEUTRAL = [
    (value, frozenset(names.split()))
    for value, names in (
        (_ANYTHING, "cache_control metadata prediction prompt_cache_breakpoint prompt_cache_key"),
        (_ANYTHING, "prompt_cache_options prompt_cache_retention reasoning_effort safety_identifier service_tier"),
        (_ANYTHING, "store user verbosity"),
        (0, "dry_multiplier dynatemp_range min_tokens mirostat top_a xtc_probability"),
        (1, "length_penalty repeat_penalty tfs_z typical_p"),
        (-1, "seed"),
        (False, "continue_final_message continuous_usage_stats echo ignore_eos include_stop_str_in_output"),
        (False, "return_token_strs use_beam_search"),
        (True, "add_generation_prompt skip_special_tokens spaces_between_special_tokens"),
        ([], "annotations functions stop_token_ids tool_calls tools"),
        (["text"], "modalities"),
        ({}, "chat_template_kwargs"),
        ("", "suffix"),
        ("auto", "function_call"),
        ("none", "function_call"),
    )
]
"""Values that ask for nothing, and the fields for which they do. Such a field need not be supported."""


def _asks_for_nothing(name: str, value: Any) -> bool:
    return value is None or any(name in names and neutral in (_ANYTHING, value) for neutral, names in _NEUTRAL)


class Body(BaseModel):
    """A body whose unknown fields are refused, unless they ask for nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        """Drop what asks for nothing, and take 16.0 for 16, which are the same number in JSON."""
        if not isinstance(body, dict):
            return body
        if len(body) > _MOST_FIELDS:  # each unknown one would have an error of its own
            raise PydanticCustomError("too_many_fields", f"{len(body)} fields; expected at most {_MOST_FIELDS}")
        return {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in body.items()
            if not _asks_for_nothing(name, value)
        }


class _JsonSchema(Body):
    """A schema that the text must fulfil."""

    definition: JsonObject = Field(alias="schema")
    name: str = Field("", max_length=1000, description="no meaning here")
    description: str = Field("", max_length=_MOST_TOKENS, description="no meaning here")
    strict: bool = Field(True, description="no meaning here: the text always fulfils the schema")


class _ResponseFormat(Body):
    """The form of the text, as OpenAI writes it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @property
    def grammar(self) -> dict[str, Any] | None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = f"json_schema is {'missing' if self.json_schema is None else 'given'}; expected it with"
            raise ApiError(400, f"{message} type json_schema, and only there", param="response_format")
        if self.json_schema is not None:
            require_finite("the schema of response_format", self.json_schema.definition, "response_format")
            return self.json_schema.definition
        return {"type": "object"} if self.type == "json_object" else None


class _StructuredOutputs(Body):
    """The form of the text, as vLLM writes it."""

    grammar: str = Field(alias="regex", min_length=1, max_length=10_000)


class _SamplingBody(Body):
    """How tokens are chosen."""

    response_format: _ResponseFormat | None = None
    structured_outputs: _StructuredOutputs | None = None
    logit_bias: dict[_TokenName, _Bias] = Field({}, max_length=1000)
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    temperature: float = Field(1.0, ge=0, le=1000)
    top_k: int | None = Field(None, ge=-1, le=2**31, description="0 and -1 are off")
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1, description="0 is off")
    repetition_penalty: float = Field(1.0, ge=0.001, le=1000)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="drawn at random by default")
    stop: _Stops = []

    def configs(self, model: ServedModel, max_tokens: int, n: int = 1) -> list[GenerationConfig]:
        if self.stop and model.tokenizer is None:
            raise ApiError(400, f"stop has texts; expected none: {model.name} has no tokenizer", param="stop")
        last = max(self.logit_bias, default=0)
        if last >= model.vocabulary:
            raise refusal("logit_bias", f"for token {last}", f"tokens from 0 to {model.vocabulary - 1}")
        seed = secrets.randbits(61) if self.seed is None else self.seed
        names = ("temperature", "repetition_penalty", "logit_bias", "presence_penalty", "frequency_penalty")
        sampling = SamplingConfig(**{name: getattr(self, name) for name in names})
        if self.temperature:  # else the others have no effect, and clients send them all the same
            top_p = None if self.top_p == 1 else self.top_p
            top_k = self.top_k if self.top_k and self.top_k > 0 else None
            sampling = replace(sampling, top_k=top_k, top_p=top_p, min_p=self.min_p or None)
        return [
            GenerationConfig(max_tokens=max_tokens, sampling=sampling, seed=seed + choice, stop=self.stop)
            for choice in range(n)
        ]

    async def constraint(self, model: ServedModel, form: AnswerForm | None = None) -> Constraint | None:
        """Compile what the text must fulfil, in another thread. Raises ApiError if that fails.

        form: of a chat's answer.
        """
        asked = {"response_format": self.response_format, "structured_outputs": self.structured_outputs}
        grammars: dict[str, Any] = {name: one.grammar for name, one in asked.items() if one is not None}
        grammars = {name: grammar for name, grammar in grammars.items() if grammar is not None}
        if len(grammars) > 1:
            message = "response_format and structured_outputs are both given; expected one of them"
            raise ApiError(400, message, param="structured_outputs")
        if form is not None:
            form.require_no_tools(*grammars)
            calls = calls_grammar(form, model.spelled_chat_ends)
            grammars |= {} if calls is None else {"tools": calls}
        for name, grammar in grammars.items():
            return await asyncio.to_thread(compile_grammar, model, name, grammar, form)
        return None


class _StreamOptions(Body):
    """What a stream reports beside the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class OpenAIBody(_SamplingBody):
    """The common fields of completions and chats."""

    model: str = Field(max_length=200)
    n: int = Field(1, ge=1, le=64)
    stream: bool = False
    stream_options: _StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _kind_of_prompt(prompt: Any) -> str:
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(prompt, str):
        return "<text>"
    return "<texts>" if isinstance(first, str) else "<lists>" if isinstance(first, list) else "<tokens>"


_Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[_Tokens, Tag("<tokens>")]
    | Annotated[list[Text], Field(max_length=_MOST_PROMPTS), Tag("<texts>")]
    | Annotated[list[_Tokens], Field(max_length=_MOST_PROMPTS), Tag("<lists>")],
    Discriminator(_kind_of_prompt),
]


class CompletionBody(OpenAIBody):
    """Continue texts or tokens."""

    prompt: _Prompt = "\n"
    max_tokens: int = Field(16, ge=0, le=_MOST_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = Field(None, description="as many as n")

    @property
    def prompts(self) -> Any:
        """The prompts: a list of texts, or of lists of tokens."""
        return self.prompt if _kind_of_prompt(self.prompt) in ("<texts>", "<lists>") else [self.prompt]


class DetokenizeBody(Body):
    """Turn tokens into text."""

    model: str | None = Field(None, max_length=200, description="which model; the first one served by default")
    tokens: _Tokens


class OpenBody(Body):
    """Open a session."""

    model: str | None = Field(None, max_length=200, description="which model; the first one served by default")
    name: _Name | None = Field(None, description="drawn at random by default")


class DetailsBody(Body):
    """What to read first, and what to report about each token."""

    text: Text | None = None
    tokens: _Tokens | None = None
    surprise: bool = Field(True, description="its log-probability")
    alternatives: int = Field(0, ge=0, le=20, description="this many of the likeliest tokens in its place")
    details: bool = Field(False, description="the transitions with which the model reads it")
    channels: int = Field(64, ge=1, le=4096, description="maximum number of channels of a layer in the details")

    def token_details(self, model: ServedModel, answers: int = 0) -> TokenDetails:
        if self.details and not model.gate_layers:
            raise refusal("details", "true", "false", f"{model.name} has no transitions")
        return TokenDetails(self.surprise, self.alternatives, answers, self.channels if self.details else 0)


class FeedBody(DetailsBody):
    """Let a session read a text, or tokens."""

    answers: int = Field(0, ge=0, le=100, description="this many of the likeliest outputs after each token")
    stream: bool = False


class GenerateBody(DetailsBody, _SamplingBody):
    """Let a session write; with a text or tokens, it reads them first."""

    max_tokens: MaxTokens = 100
    stream: bool = True


class ForkBody(Body):
    """Open a session that continues from a position of another."""

    name: _Name | None = None
    position: _Position | None = Field(None, description="after this many tokens; the end by default")


class RewindBody(Body):
    """Go back to a position."""

    position: _Position


async def encode(model: ServedModel, *texts: str, is_first: bool = True) -> list[list[int]]:
    """Encode texts. Long ones take time and are left to another thread, so that streams continue."""

    def encode_all() -> list[list[int]]:
        return [model.encode(text, is_first=is_first) for text in texts]

    return encode_all() if sum(map(len, texts)) <= _SHORT_TEXT else await asyncio.to_thread(encode_all)


def require_tokens(model: ServedModel, **fields: list[int]) -> None:
    """Raise ApiError if a list has tokens that the model does not know, by the name of its field."""
    for name, tokens in fields.items():
        wrong = next((token for token in tokens if not 0 <= token < model.vocabulary), None)
        if wrong is not None:
            raise refusal(name, f"a list with {wrong}", f"tokens from 0 to {model.vocabulary - 1}")


def require_generation(model: ServedModel) -> None:
    if not model.predicts_tokens:
        got, expected = f"{model.name!r}, which predicts classes", "one that predicts tokens"
        raise refusal("model", got, expected, code="cannot_generate")


def require_collectable(*requests: Request, n_choices: int = 1) -> None:
    """Raise ApiError if the response is too large to be sent in one piece.

    Each of a request's `n_choices` continuations repeats what is reported about the tokens that are read.
    """
    n_written = sum(config.max_tokens or 0 for request in requests for config in request.configs)
    n_read = sum(len(request.tokens) for request in requests if request.reports_prompt)
    n_tokens, each = n_written + n_read * n_choices, requests[0].numbers_per_token
    if n_tokens * each > _MOST_NUMBERS:
        got = f"false, for {n_tokens:,} tokens with {each} numbers each"
        hint = "stream the answer, or ask for fewer tokens or less of each"
        raise refusal("stream", got, f"{_MOST_NUMBERS:,} in all", hint)


_SHOULD = re.compile(r"^\w+ should (be |have |match )?")


def refusal_of(error: Mapping[str, Any], body: Any) -> tuple[str | None, str]:
    """Return the field of an error of pydantic, None for the whole body, and our sentence.

    Tags of unions, which are in brackets, are no fields, nor is what else pydantic names and the body does not have.
    """
    (place, *parts), kind, fields, value = error["loc"], error["type"], [], body
    for part in parts:
        if str(part).startswith("<"):
            continue
        try:
            value = value[part]
        except (LookupError, TypeError):
            if place == "body" and not (kind == "missing" and part == parts[-1]):
                continue
        fields.append(str(part))
    where = ".".join(fields) if kind != "json_invalid" else ""
    name = where or "the body"
    if kind == "missing":
        return where or None, sentence(name, "missing", "a value")
    if kind == "extra_forbidden":
        return where or None, sentence(name, reprlib.repr(error["input"]), "no such field", "it is not supported")
    if kind == "too_many_fields":
        return where or None, f"{name}: {error['msg']}"
    if kind == "value_error":
        return where or None, f"{name}: {error['ctx']['error']}"
    if kind == "json_invalid":
        return None, sentence(name, f"not readable as JSON ({error['ctx']['error']})", "a JSON object")
    return where or None, sentence(name, reprlib.repr(error["input"]), _SHOULD.sub("", error["msg"]))
