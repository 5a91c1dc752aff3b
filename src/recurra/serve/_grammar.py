"""Structured output: the tokens that a JSON schema or a regular expression allows next, found by llguidance."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from recurra._files.reading import one_line
from recurra.checks import sentence
from recurra.data.tokenizers import ByteEncoder, BytePairEncoding
from recurra.serve._http import ApiError, refusal
from recurra.serve._tools import TAGS, AnswerForm
from recurra.streams.continuation import TextEncoder

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from recurra.serve._model import ServedModel

WHITESPACE = r"[ \n\t]{1,40}"
"""Between the tokens of JSON. Without an end to it, a small model may write nothing else."""
_FUEL: dict[str, Any] = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 20_000}
"""Limits a step to 0.1 s. Most take 20 us; (a{1000}){1000} would take 15 s, and then be refused."""
_AFTER_REASON = re.compile(r"\n(?:<|\s*\d+ \| )")
"""In the library's errors: its state, or lines of the grammar."""
_PLACE = re.compile(r"at (\d+)\(\d+\): (failed to compile JSON schema: )?")
_AFTER_REASONING: dict[str, str] = {
    "open": r"""
        start: reasoning ("\n" | "\n\n")? @rest
        reasoning[lazy]: /(.|\n)*<\/think>/
    """,
    "possible": r"""
        start: (reasoning ("\n" | "\n\n")?)? @rest
        reasoning[lazy]: /<think>(.|\n)*<\/think>/
    """,
}
"""Grammars of an answer that begins with reasoning, or may begin with it. Models differ in the lines after it."""


class Lark(str):
    """A grammar in llguidance's dialect of Lark."""


class Constraint:
    """The tokens that a grammar allows next in one text; one of `ends` may end the text once it is complete."""

    def __init__(self, matcher: LLMatcher, n_tokens: int, ends: Sequence[int] = ()) -> None:
        self._matcher, self._n_tokens, self._ends = matcher, n_tokens, list(ends)
        self._look_ahead()

    def copy(self) -> Constraint:
        """Return a twin for another text."""
        twin = copy.copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def advance(self, token: int) -> None:
        """Take the next token of the text."""
        if token not in self._ends or not self._matcher.is_accepting():
            self._matcher.consume_token(token)
            self._look_ahead()

    def _look_ahead(self) -> None:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(mask, count=self._n_tokens, bitorder="little")  # all but the last, the end of the text
        is_accepting = self._matcher.is_accepting()
        self.is_complete = not bits.any() and is_accepting
        if is_accepting and self._ends:
            bits[self._ends] = 1
        self.allowed = torch.from_numpy(bits.view(np.bool_))

    @property
    def error(self) -> str:
        """Why the grammar cannot be used; "" if it can."""
        reason, *_ = _AFTER_REASON.split(self._matcher.get_error())
        return one_line(ValueError(reason)) if self._matcher.is_error() else ""


def restrict(logits: Tensor, constraints: Sequence[Constraint | None]) -> Tensor:
    """Set the logits of forbidden tokens to -inf, in (sequences, tokens); sequences without a constraint stay."""
    present = {row: constraint for row, constraint in enumerate(constraints) if constraint is not None}
    logits = logits.clone() if present else logits
    for row, constraint in present.items():
        logits[row].masked_fill_(~constraint.allowed, -torch.inf)
    return logits


def compile_grammar(
    model: ServedModel,
    field: str,
    grammar: str | dict[str, Any] | Lark,
    form: AnswerForm | None = None,
) -> Constraint:
    """Compile a regular expression, a JSON schema, or a grammar, that the body's `field` has.

    form: of a chat's answer, which may begin with reasoning and ends with tokens of the chat. Raises ApiError if the
    grammar cannot be compiled.
    """
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError as error:
        hint = f'{error.name} is missing on this server: pip install "recurra[serve]"'
        raise refusal(field, "a grammar", "none", hint, status=501) from error
    if isinstance(grammar, Lark):
        text = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    elif isinstance(grammar, str):
        text = LLMatcher.grammar_from_regex(grammar)
    else:
        text = LLMatcher.grammar_from_json_schema(grammar, defaults={"whitespace_pattern": WHITESPACE})
    if form is not None and (before := _AFTER_REASONING.get(form.reasoning)):
        (rest,) = json.loads(text)["grammars"]
        text = json.dumps({"grammars": [{"lark_grammar": before}, rest | {"name": "rest"}]})
    limits = LLParserLimits(verbose_errors=False, **_FUEL)
    matcher = LLMatcher(model.grammar_tokenizer, text, log_level=0, limits=limits)
    constraint = Constraint(matcher, model.vocabulary, () if form is None else model.chat_end_tokens)
    reason = constraint.error
    if reason in ("", "NoExtensionBias") and not constraint.allowed.any():
        reason = "no text of this model's tokens, but for the empty one, matches it"
    if isinstance(grammar, Lark) and form is not None and (place := _PLACE.match(reason)):
        rule = re.match(r"call_(\d+)", grammar.split("\n")[int(place[1]) - 1])
        name = f"the schema of {form.tools[int(rule[1])].name}" if rule else field
        got = f"one that cannot be used ({reason[place.end() :]})"
        raise ApiError(400, sentence(name, got, "a JSON schema that llguidance supports"), param=field)
    if reason:
        expected = "a JSON schema or regular expression that llguidance supports"
        raise refusal(field, f"a grammar that cannot be used ({reason})", expected)
    return constraint


class _SpelledTokens:
    """The bytes of all tokens in the form that llguidance reads, with one more token, the end of the text.

    A model need not have such a token: no text ends with it, but one where nothing else is allowed is complete.
    """

    bos_token_id = None

    def __init__(self, tokens: list[bytes], encode: Callable[[bytes], list[int]]) -> None:
        self.tokens, self.eos_token_id, self._encode = [*tokens, b""], len(tokens), encode
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


def grammar_tokenizer(name: str, tokenizer: TextEncoder | None, n_tokens: int) -> LLTokenizer:
    """Return the tokenizer of the model `name` in llguidance's form. Raises ApiError if its tokens have no bytes."""
    from llguidance import LLTokenizer, TokenizerWrapper

    encode: Callable[[bytes], list[int]]
    if tokenizer is None:
        raise refusal("model", f"{name}, which has no tokenizer", "one with a tokenizer: a grammar describes a text")
    n_spelled = min(len(tokenizer), n_tokens)
    if isinstance(tokenizer, BytePairEncoding):
        spelled = LLTokenizer(tokenizer.to_json(), eos_token=0)  # any: it is not used for the end of a text
        special = [spelled.is_special_token(token) for token in range(n_spelled)]
        tokens = [b"" if special[token] else spelled.decode_bytes([token]) for token in range(n_spelled)]
        for token, text in ((token, tokenizer.decode([token])) for token in range(n_spelled) if special[token]):
            tokens[token] = text.encode() if text in TAGS else b""
        encode = spelled.tokenize_bytes
    elif isinstance(tokenizer, ByteEncoder):
        tokens, encode = [bytes([token]) for token in range(n_spelled)], list
    else:
        texts = [tokenizer.decode([token]) for token in range(n_spelled)]
        if "".join(texts) != tokenizer.decode(range(n_spelled)):
            got = f"{name}, whose tokens are words with blanks between them"
            raise refusal("model", got, "one whose tokens can spell any text")
        tokens = [text.encode() for text in texts]
        encode = lambda text: tokenizer.encode(text.decode(errors="replace")).tolist()  # noqa: E731
    return LLTokenizer(TokenizerWrapper(_SpelledTokens([*tokens, *[b""] * (n_tokens - n_spelled)], encode)))
