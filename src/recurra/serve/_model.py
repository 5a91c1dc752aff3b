"""A model that the server runs, its tokenizer and chat template, and the state of a stream through it."""

import hashlib
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Assign, Impossible, List, Name, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torch import Tensor, nn

from recurra._choices import RECENT_TOKENS
from recurra.checks import require, sentence
from recurra.decoding._prompts import PromptReader
from recurra.decoding.linear import MOST_VECTORS
from recurra.decoding.steps import CompiledStep, prepare
from recurra.mixers.base import Dim
from recurra.models.shell import mixers_with_transition, transition_of
from recurra.serve._grammar import grammar_tokenizer
from recurra.serve._http import ApiError, refusal
from recurra.serve._tools import ChatFormat
from recurra.state import batch, n_bytes, split
from recurra.streams.continuation import TextEncoder, TextPieces, encode_first, first_tokens
from recurra.streams.sampling import SamplingConfig, TokenChoice, choose
from recurra.streams.snapshot import ModelIdentity
from recurra.streams.stream import require_evaluation_mode

if TYPE_CHECKING:
    from llguidance import LLTokenizer


_FEW = 4
"""Tokens of several prompts that steps may read; of more, compiled prompts are as fast."""
_OWN_VARIABLES = {"messages", "tools", "documents", "bos_token", "eos_token", "eos_tokens", "add_generation_prompt"}
_OWN_VARIABLES |= {"raise_exception", "strftime_now", *DEFAULT_NAMESPACE}
"""Variables of chat templates that no request sets."""
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError)


class PausedStream(NamedTuple):
    """A stream between two requests. It never changes, so streams can share it.

    It keeps no logits, which can take several times the memory of the model's state. Instead the last token is left
    unread: the next step reads it and computes them.
    """

    model_state: Any  # before the last token, with batch size 1
    recent: tuple[int, ...] = ()  # the last tokens, at most `RECENT_TOKENS`, with the unread one at the end
    position: int = 0  # the number of tokens, the unread one included

    @property
    def unread(self) -> tuple[int, ...]:
        return self.recent[-1:]

    def after(self, tokens: Sequence[int], model_state: Any) -> "PausedStream":
        """Return the stream after `tokens`, where `model_state` has read all of them but the last."""
        recent = (*self.recent, *tokens[-RECENT_TOKENS:])[-RECENT_TOKENS:]
        return PausedStream(model_state, recent, self.position + len(tokens))


class ServedModel:
    """A language model prepared to serve streams, under the name that requests use.

    Args:
        tokenizer: None for a model that reads numbers.
        weights: dtype of the packed weights; None runs the model as it is.
        in_place: pack the model itself, freeing its weights.
        dtypes_of_states: `kv_cache_dtype` and `state_dtype` of `prepare`, with packed weights.
        task: describes its tokens to the explorer (see `recurra.train.task.Task.explored`).
        chat_template: a Jinja template in transformers' format.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        tokenizer: TextEncoder | None = None,
        *,
        weights: str | None = None,
        in_place: bool = False,
        dtypes_of_states: dict[str, str] | None = None,
        task: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        require_evaluation_mode(model)
        self.name, self.tokenizer, self.weights, self.chat_template = name, tokenizer, weights, chat_template
        self.task = task
        rounded: dict[str, Any] = {n: kind for n, kind in (dtypes_of_states or {}).items() if kind != "float32"}
        identity = json.dumps(ModelIdentity.of(model), sort_keys=True)
        if rounded:  # sessions have other states
            require(weights is not None, ", ".join(rounded), ", ".join(rounded.values()), "float32 without weights")
            identity += json.dumps(rounded, sort_keys=True)
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self.runner: nn.Module = model if weights is None else prepare(model, weights, **rounded, in_place=in_place)
        self.plain = cast(Any, self.runner.model if isinstance(self.runner, CompiledStep) else self.runner)
        self.config: Any = self.plain.config
        self.vocabulary = int(self.config.vocab_size)
        with torch.inference_mode():
            self.start = PausedStream(self.plain.initial_state(1))
            _, state = self.runner(torch.zeros(1, 1, dtype=torch.int64), self.start.model_state)
            self.outputs = len(self.runner(torch.zeros(1, 1, dtype=torch.int64), state)[0].flatten())
        self.predicts_tokens = self.outputs == self.vocabulary  # which it can read, so that it can generate
        self.state_bytes = n_bytes(state)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record prompts, steps of every batch size and the sampling kernel, so no stream has to wait for it later."""
        like = self.runner(torch.zeros(1, 1, dtype=torch.int64), self.start.model_state)[0][:, 0]
        choose(like, [TokenChoice(SamplingConfig(), torch.Generator())])
        if isinstance(self.runner, CompiledStep):
            for size in self.runner.sizes:
                self.runner.program(size)
        _ = self._pieces

    @cached_property
    def _pieces(self) -> PromptReader | None:
        """What reads all prompts, if they can be compiled: each by itself, as fast as several together.

        In float32, torch's products are faster over many tokens.
        """
        prompts = self.runner.prompts if isinstance(self.runner, CompiledStep) and self.weights != "float32" else None
        return prompts if prompts is not None and prompts.has_pieces() else None

    @torch.inference_mode()
    def read(self, tokens: Tensor, states: list[Any]) -> tuple[Tensor, list[Any]]:
        """Read tokens (B, L) from a state for each row; return the head's input after each of them, and the states.

        A prompt is always read by compiled programs, or always by the model itself: then the numbers do not depend on
        how prompts are cut and put together.
        """
        if self._pieces is None:
            hidden, state = self.plain.hidden(tokens, batch(states))
            return hidden, split(state)
        rows = [self._pieces.read_in_pieces(row, state) for row, state in zip(tokens.split(1), states)]
        return torch.cat([hidden for hidden, _ in rows]), [state for _, state in rows]

    @torch.inference_mode()
    def advance(self, tokens: Tensor, states: list[Any]) -> list[Any]:
        """Read tokens as `read` does; return the states alone.

        A few tokens of many streams are read by steps, whose numbers are the same, because one pass over the weights
        then serves all streams.
        """
        n_streams, n_tokens = tokens.shape
        if self._pieces is None or n_tokens > _FEW or n_streams < 2 * n_tokens:
            return self.read(tokens, states)[1]
        state = batch(states)
        for column in tokens.split(1, 1):
            _, state = self.runner(column, state)
        return split(state)

    def least_copies(self, n_tokens: int) -> int:
        """Return how often to read a few tokens at once for the sums that they would have within many."""
        return -(-(MOST_VECTORS + 1) // n_tokens) if self.weights in (None, "float32") else 1

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        return self.runner.head(hidden)  # type: ignore[operator]

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        """Return a text's tokens; is_first: it begins a stream. Raises ApiError if the model has no tokenizer."""
        if self.tokenizer is None:
            raise ApiError(400, sentence("prompt", "a text", "token ids", f"{self.name} has no tokenizer"))
        return (encode_first(self.tokenizer, text) if is_first else self.tokenizer.encode(text)).tolist()

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens)) if self.tokenizer is None else self.tokenizer.decode(tokens)

    def text_of(self, token: int) -> str:
        return str(token) if self.tokenizer is None else self.tokenizer.decode([token])

    def text_pieces(self, before: Sequence[int]) -> Callable[[int], str]:
        """Return a function that maps each of the tokens that follow `before` to the text that it settles."""
        return str if self.tokenizer is None else TextPieces(self.tokenizer, before).add

    def first_tokens(self) -> list[int]:
        """Return the beginning of a stream that has no prompt. Raises ApiError if the model needs one."""
        tokens = [] if self.tokenizer is None else first_tokens(self.tokenizer)
        if not tokens:
            raise ApiError(400, sentence("prompt", "empty", f"at least one token for {self.name} to continue"))
        return tokens

    def chat_text(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Return the text of a chat up to the answer, as transformers' `apply_chat_template` makes it.

        variables: others that the template reads. Raises ApiError if the template refuses all this, or knows no tools.
        """
        if self._template is None:
            message = f"{self.name} has no chat template; expected a model with one: use /v1/completions"
            raise ApiError(400, message, code="no_chat_template", param="model")
        names = self._template_variables
        if tools and not ("tools" in names and self.chat_format.calls):
            why = "calls tools in no format that is known here" if "tools" in names else "knows no tools"
            raise refusal("tools", f"a list of {len(tools)}", "none", f"the chat template of {self.name} {why}")
        if unknown := next((name for name in variables or () if name not in names - _OWN_VARIABLES), None):
            known = ", ".join(sorted(names - _OWN_VARIABLES)) or "none"
            raise refusal("chat_template_kwargs", f"with {unknown!r}", f"variables of the chat template: {known}")
        try:
            unnamed = StrictUndefined("it uses eos_token, which a run does not name: write it into the template itself")
            own = {"messages": messages, "bos_token": "", "eos_token": unnamed, "tools": tools or None}
            return self._template.render({**(variables or {}), **own}, documents=None, add_generation_prompt=True)
        except _TEMPLATE_ERRORS as error:
            raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error

    @cached_property
    def _template(self) -> Template | None:
        if self.chat_template is None:
            return None
        try:
            return _template_environment().from_string(self.chat_template)
        except _TEMPLATE_ERRORS as error:
            raise ApiError(400, f"the chat template cannot be used: {error}", param="model") from error

    @cached_property
    def _template_variables(self) -> set[str]:
        return find_undeclared_variables(_template_environment().parse(self.chat_template or ""))

    @cached_property
    def chat_format(self) -> ChatFormat:
        """What the template says about answers."""
        return ChatFormat.of(self.chat_template or "")

    @cached_property
    def chat_ends(self) -> list[str]:
        """The texts that end an answer in a chat: what a line of the template sets `eos_tokens` to."""
        body = [] if self.chat_template is None else _template_environment().parse(self.chat_template).body
        lines = [line for line in body if isinstance(line, Assign) and isinstance(line.target, Name)]
        found = next((line.node for line in lines if line.target.name == "eos_tokens"), None)  # type: ignore[attr-defined]
        try:
            ends = found.as_const() if isinstance(found, List) else []
        except Impossible:
            return []
        return [end for end in ends if isinstance(end, str) and end]

    @cached_property
    def chat_end_tokens(self) -> list[int]:
        """Those of the texts that end an answer that are one token each."""
        encoded = [self.encode(end, is_first=False) for end in self.chat_ends]
        return [tokens[0] for tokens in encoded if len(tokens) == 1]

    @cached_property
    def spelled_chat_ends(self) -> list[str]:
        """The others."""
        return [end for end in self.chat_ends if len(self.encode(end, is_first=False)) > 1]

    @cached_property
    def grammar_tokenizer(self) -> "LLTokenizer":
        """The tokenizer in the form that grammars need. Raises ApiError if they cannot use it."""
        return grammar_tokenizer(self.name, self.tokenizer, self.vocabulary)

    @cached_property
    def gate_layers(self) -> dict[int, int]:
        """The number of channels of each layer whose mixer has a transition."""
        mixers = mixers_with_transition(self.plain)
        return {layer: self._channels(mixer) for layer, mixer in mixers.items()}

    def _channels(self, mixer: nn.Module) -> int:
        with torch.inference_mode():
            like = next(iter((*mixer.parameters(), *mixer.buffers())))
            dtype = like.dtype if like.is_floating_point() else torch.float32  # int8 weights take float32
            x = torch.zeros(1, 1, int(self.config.d_model), dtype=dtype)
            return int(transition_of(mixer, x)[0].shape[-1])

    @cached_property
    def state_growth(self) -> list[dict[str, int | None]]:
        """The bytes that each token adds to the state after the first, up to a number of tokens; None for no end."""
        mixers = [block.mixer for block in getattr(self.plain, "blocks", ()) if hasattr(block, "mixer")]
        growth: dict[int | None, int] = {}
        for spec in (spec for mixer in mixers for spec in getattr(mixer, "state_layout", ())):
            for dim in (size for size in getattr(spec, "shape", ()) if isinstance(size, Dim)):
                each = spec.dtype(torch.float32).itemsize * prod(size for size in spec.shape if isinstance(size, int))
                growth[dim.most] = growth.get(dim.most, 0) + each
        return [{"bytes": each, "tokens": most} for most, each in growth.items()]

    @property
    def cache_bytes_per_token(self) -> int:
        """Size of a float16 key-value cache for one token, with the same number of layers and channels."""
        return 2 * self._size("n_layer") * self._size("d_model") * 2

    def _size(self, name: str) -> int:
        return int(getattr(self.config, name, 0))

    def description(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "weights": self.weights or "as trained",
            "vocabulary": self.vocabulary,
            "outputs": self.outputs,
            "predicts": "tokens" if self.predicts_tokens else "classes",
            "has_tokenizer": self.tokenizer is not None,
            "has_chat_template": self.chat_template is not None,
            "layers": self._size("n_layer"),
            "width": self._size("d_model"),
            "state_bytes": self.state_bytes,
            "state_growth": self.state_growth,
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "gates": [{"layer": layer, "channels": channels} for layer, channels in self.gate_layers.items()],
        }


def _template_environment() -> ImmutableSandboxedEnvironment:
    """Make an environment with the extensions that transformers gives to chat templates."""
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON as transformers does; Jinja's own filter escapes it for HTML and sorts the keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, which marks what a model has written and changes no text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
