"""Parse chat answers into reasoning, text and tool calls, in the formats of Hermes and Qwen.

    <think>...</think>
    <tool_call>{"name": "NAME", "arguments": {...}}</tool_call>
    <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>

Hermes, Qwen 2.5, Qwen 3 and Granite 4 write calls as JSON, Qwen3-Coder and Qwen 3.5 as XML.
"""

import json
import re
import secrets
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from recurra.serve._http import ApiError
from recurra.serve._schemas import refuse_constant, typed

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
TAGS = (THINK, END_THINK, CALL, END_CALL)
"""Those that tokenizers have as one token, which may be a special one."""

_MOST_SPACE = 64
"""Characters of white space between tags. Without a limit, looking for the next tag would start over and over."""
_ARGUMENTS = re.compile(r'"arguments\\*"')
"""The key in a template, within a text whose quotes may be escaped."""
_SPACE = re.compile(rf"\s{{0,{_MOST_SPACE}}}")
_STRUCTURE = re.compile(r'["{}\[\]<]')
_STRING_END = re.compile(r'["\\\n]')
_NAME = re.compile(r"[^<>\n]{1,200}>")
_NAME_SO_FAR = re.compile(r"[^<>\n]{0,200}")
_VALUE_END = re.compile(rf"{END_PARAMETER}\s{{0,{_MOST_SPACE}}}(?={PARAMETER}|{END_FUNCTION})")
_LONGEST_VALUE_END = len(END_PARAMETER) + _MOST_SPACE + len(END_FUNCTION)

Calls = Literal["json", "xml"]
"""The formats of calls."""
Reasoning = Literal["none", "possible", "open"]
"""Whether an answer may begin with reasoning, or does, because the prompt ends with the tag."""


@dataclass(frozen=True)
class ChatFormat:
    """The answer format that a chat template describes.

    Args:
        calls: the format of calls; None if the template describes no known one.
        reasons: whether it has reasoning tags.
    """

    calls: Calls | None = None
    reasons: bool = False

    @classmethod
    def of(cls, template: str) -> "ChatFormat":
        known: tuple[tuple[Calls, object], ...] = (("xml", FUNCTION in template), ("json", _ARGUMENTS.search(template)))
        calls = next((name for name, is_there in known if is_there and CALL in template), None)
        return cls(calls, END_THINK in template)

    def reasoning(self, prompt: str) -> Reasoning:
        """Return whether the answer to a prompt has reasoning."""
        end = prompt[-100:].rstrip()
        if not self.reasons or end.endswith(END_THINK):
            return "none"
        return "open" if end.endswith(THINK) else "possible"


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]  # JSON schema of the arguments
    strict: bool = False


@dataclass(frozen=True)
class Call:
    """A tool call, number `index` in its answer, counted from 0. `arguments` is a JSON object as text."""

    name: str
    arguments: str
    index: int = 0
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def json(self) -> dict[str, Any]:
        """Return the call in the form of a complete message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def deltas(self) -> list[dict[str, Any]]:
        """Return the call as two streaming deltas: the name, then the arguments."""
        begin = {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": ""}}
        return [{"index": self.index, **begin}, {"index": self.index, "function": {"arguments": self.arguments}}]


class Piece(NamedTuple):
    """A part of an answer's text, without tags."""

    text: str
    is_reasoning: bool


@dataclass(frozen=True)
class AnswerForm:
    """What a chat answer may contain.

    Args:
        reasoning: whether the answer begins with reasoning.
        calls: the format of calls; None if calls are not allowed.
        tools: tools that may be called.
        is_forced: whether the answer must call a tool.
        several: whether it may contain more than one call.
    """

    reasoning: Reasoning = "none"
    calls: Calls | None = None
    tools: list[Tool] | tuple[()] = ()
    is_forced: bool = False
    several: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether the answer is only text, without reasoning or calls."""
        return self.reasoning == "none" and self.calls is None

    def require_no_tools(self, *fields: str) -> None:
        """Raise ApiError if tools are combined with a field that constrains the text."""
        if fields and self.calls is not None:
            message = f"tools and {fields[0]} are both given; expected one of them, or tool_choice 'none'"
            raise ApiError(400, message, param=fields[0])


class AnswerReader:
    """Parses an answer while it is generated.

    Text is passed on as soon as it cannot belong to a tag. A call is passed on when it is complete; a
    malformed or truncated call is text. White space next to tags is dropped, up to 64 characters. The time is
    linear in the length of the answer: no text is read twice.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._schemas = {tool.name: tool.parameters for tool in form.tools}
        self._text, self._at, self._is_over = "", 0, False
        self._found: list[Piece | Call] = []
        self._is_reasoning = False
        self._space, self._is_after_tag = "", False
        self.n_calls = 0
        self._steps = self._read()
        next(self._steps)

    def add(self, text: str, is_last: bool = False) -> list[Piece | Call]:
        """Return the pieces and calls that `text` completes."""
        self._text += text
        self._is_over = is_last
        next(self._steps, None)
        found, self._found = self._found, []
        return found

    def _read(self) -> Generator[None, None, None]:
        yield
        begins = self._form.reasoning != "none" and (yield from self._literal(THINK)) is not None
        if begins or self._form.reasoning == "open":
            yield from self._read_reasoning()
        tags = () if self._form.calls is None else (CALL,)
        while (yield from self._until(*tags)) is not None:
            begin = self._at
            self._at += len(CALL)
            call = yield from (self._xml_call() if self._form.calls == "xml" else self._json_call())
            if call is None:
                self._put(self._text[begin : self._at])
                continue
            if self._form.several or not self.n_calls:
                self._found.append(replace(call, index=self.n_calls))
                self.n_calls += 1
            self._pass_tag()
        if not self._is_after_tag and self._space:
            self._found.append(Piece(self._space, self._is_reasoning))

    def _read_reasoning(self) -> Generator[None, None, None]:
        """Read to the end of the reasoning. Calls in it are part of it, unless it has no closing tag."""
        self._pass_tag(is_reasoning=True)
        tags = (END_THINK,) if self._form.calls is None else (END_THINK, CALL)
        tag, begin = (yield from self._until(*tags)), self._at
        if tag == CALL:
            tag = yield from self._find(END_THINK)
            if tag is None:
                self._at = begin
            else:
                self._put(self._text[begin : self._at])
        if tag is not None:
            self._at += len(tag)
            self._pass_tag()

    def _more(self) -> Generator[None, None, bool]:
        """Wait for more text; return False if there is none."""
        if not self._is_over:
            yield
            return True
        return False

    def _pass_tag(self, is_reasoning: bool = False) -> None:
        self._is_reasoning, self._space, self._is_after_tag = is_reasoning, "", True

    def _put(self, text: str) -> None:
        """Pass on text; hold back trailing white space, which is dropped if a tag follows."""
        text = self._space + text
        text = text.lstrip() if self._is_after_tag else text
        settled = text.rstrip()
        if len(text) > len(settled) + _MOST_SPACE:
            settled = text
        self._space = text[len(settled) :]
        if settled:
            self._is_after_tag = False
            self._found.append(Piece(settled, self._is_reasoning))

    def _until(self, *tags: str) -> Generator[None, None, str | None]:
        """Pass on the text before the first of `tags`, and return that tag; None if there is none."""
        while True:
            self._text, self._at = self._text[self._at :], 0
            places = [(place, tag) for tag in tags if (place := self._text.find(tag)) >= 0]
            end, tag = min(places, default=(len(self._text) - self._n_begun(tags), None))
            self._put(self._text[:end])
            self._at = end
            if tag is not None or not (yield from self._more()):
                break
        if tag is None:
            self._put(self._text[self._at :])
            self._at = len(self._text)
        return tag

    def _n_begun(self, tags: tuple[str, ...]) -> int:
        """Return the length of the longest suffix of the text that is the beginning of a tag."""
        lengths = (n for tag in tags for n in range(1, len(tag)) if self._text.endswith(tag[:n]))
        return max(lengths, default=0)

    def _find(self, tag: str) -> Generator[None, None, str | None]:
        """Move to the next `tag` and return it; None if there is none."""
        while (place := self._text.find(tag, self._at)) < 0:
            self._at = max(self._at, len(self._text) - len(tag) + 1)
            if not (yield from self._more()):
                return None
        self._at = place
        return tag

    def _literal(self, *words: str) -> Generator[None, None, str | None]:
        """Skip white space and one of `words`, and return that word; None if something else follows."""
        while True:
            match = _SPACE.match(self._text, self._at)
            begin = self._at if match is None else match.end()
            for word in words:
                if self._text.startswith(word, begin):
                    self._at = begin + len(word)
                    return word
            rest = self._text[begin : begin + max(map(len, words))]
            if not any(word.startswith(rest) for word in words) or not (yield from self._more()):
                return None

    def _json_call(self) -> Generator[None, None, Call | None]:
        if (yield from self._literal("{")) is None:
            return None
        begin, depth = self._at - 1, 1
        while depth:
            match = _STRUCTURE.search(self._text, self._at)
            self._at = len(self._text) if match is None else match.end()
            if match is None:
                if not (yield from self._more()):
                    return None
            elif match.group() == '"':
                if not (yield from self._pass_string()):
                    return None
            elif match.group() == "<":  # never valid JSON outside a string
                self._at -= 1
                return None
            else:
                depth += 1 if match.group() in "{[" else -1
        text = self._text[begin : self._at]
        return _json_call(text) if (yield from self._literal(END_CALL)) is not None else None

    def _pass_string(self) -> Generator[None, None, bool]:
        """Move to the end of a JSON string; return False if it is not closed."""
        while True:
            match = _STRING_END.search(self._text, self._at)
            self._at = len(self._text) if match is None else match.start()
            if match is None or (match.group() == "\\" and match.end() == len(self._text)):
                if not (yield from self._more()):
                    return False
            elif match.group() == "\n":
                return False
            else:
                self._at = match.end() + (match.group() == "\\")
                if match.group() == '"':
                    return True

    def _xml_call(self) -> Generator[None, None, Call | None]:
        if (yield from self._literal(FUNCTION)) is None or (name := (yield from self._name())) is None:
            return None
        values: dict[str, str] = {}
        while (tag := (yield from self._literal(PARAMETER, END_FUNCTION))) == PARAMETER:
            if (key := (yield from self._name())) is None or (value := (yield from self._value())) is None:
                return None
            values[key] = value
        if tag is None or (yield from self._literal(END_CALL)) is None:
            return None
        schema = self._schemas.get(name, {})
        return Call(name, json.dumps(typed(values, schema), ensure_ascii=False))

    def _name(self) -> Generator[None, None, str | None]:
        """Read a name and the bracket after it; None if there is none."""
        while (match := _NAME.match(self._text, self._at)) is None:
            if _NAME_SO_FAR.fullmatch(self._text, self._at) is None or not (yield from self._more()):
                return None
        self._at = match.end()
        return match.group()[:-1]

    def _value(self) -> Generator[None, None, str | None]:
        """Read a value and its closing tag, which counts only if another argument or the end of the call follows."""
        begin = self._at
        while (match := _VALUE_END.search(self._text, self._at)) is None:
            self._at = max(self._at, len(self._text) - _LONGEST_VALUE_END)
            if not (yield from self._more()):
                return None
        self._at = match.end()
        return self._text[begin : match.start()].removeprefix("\n").removesuffix("\n")


def _json_call(text: str) -> Call | None:
    """Return the call in a JSON text; None if it is not a valid call."""
    try:
        found = json.loads(text, parse_constant=refuse_constant)
        name, arguments = found.get("name"), found.get("arguments", found.get("parameters", {}))
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + written).encode()  # ValueError for an unpaired surrogate
        return Call(name, written)
    except (ValueError, RecursionError):
        return None
