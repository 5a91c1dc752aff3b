"""Parse chat answers into reasoning, text and tool calls, in the formats of Hermes and Qwen.

    <think>...</think>
    <tool_call>{"name": "NAME", "arguments": {...}}</tool_call>
    <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>

Hermes, Qwen 2.5, Qwen 3 and Granite 4 write calls as JSON, Qwen3-Coder and Qwen 3.5 as XML.
"""

import json
import re
import secrets
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from recurra.serve._http import ApiError
from recurra.serve._schemas import ArgumentTypes, refuse_constant

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
_SPACE = re.compile(rb"\s{0,%d}" % _MOST_SPACE)
_STRUCTURE = re.compile(rb'["{}\[\]<]')
_STRING_END = re.compile(rb'["\\\n]')
_NAME = re.compile(rb"([^<>\n]{1,800})(>|\Z)|\Z")
_QUOTED_NAME = re.compile(rb'([^"\\\n]{1,800})("|\Z)|\Z')
_VALUE_END = re.compile(
    rf"{END_PARAMETER}\s{{0,{_MOST_SPACE}}}(?={PARAMETER}|{END_FUNCTION}\s{{0,{_MOST_SPACE}}}</?tool_call>)".encode()
)
_LONGEST_VALUE_END = len(END_PARAMETER + END_FUNCTION + END_CALL) + 2 * _MOST_SPACE

Calls = Literal["json", "xml"]
"""The formats of calls."""
Reasoning = Literal["none", "possible", "open"]
"""Whether an answer may begin with reasoning, or does, because the prompt ends with the tag."""


@dataclass(frozen=True)
class ChatFormat:
    """The answer format that a chat template describes."""

    calls: Calls | None = None  # None if the template describes no known format of calls
    reasons: bool = False  # whether it has reasoning tags

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
    """The beginning of a tool call, number `index` in its answer, counted from 0."""

    name: str
    index: int = 0
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def json(self, arguments: str) -> dict[str, Any]:
        """Return the call in the form of a complete message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}

    def delta(self) -> dict[str, Any]:
        """Return the call as part of a stream."""
        return {"index": self.index, **self.json("")}


class Arguments(NamedTuple):
    """The next part of the arguments of call number `call`. All parts together are a JSON object as text."""

    text: str
    call: int

    def delta(self) -> dict[str, Any]:
        """Return the arguments as part of a stream."""
        return {"index": self.call, "function": {"arguments": self.text}}


def whole_calls(parts: list[Call | Arguments]) -> list[dict[str, Any]]:
    """Return calls in the form of a complete message."""
    arguments: dict[int, list[str]] = defaultdict(list)
    for part in parts:
        if isinstance(part, Arguments):
            arguments[part.call].append(part.text)
    return [call.json("".join(arguments[call.index])) for call in parts if isinstance(call, Call)]


class Piece(NamedTuple):
    """A part of an answer's text, without tags."""

    text: str
    is_reasoning: bool


@dataclass(frozen=True)
class AnswerForm:
    """What a chat answer may contain."""

    reasoning: Reasoning = "none"
    calls: Calls | None = None  # their format; None if calls are not allowed
    tools: list[Tool] | tuple[()] = ()
    is_forced: bool = False  # whether it must call a tool
    several: bool = True  # whether it may contain more than one call

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

    Text is passed on as soon as it cannot belong to a tag. The arguments of a JSON call are passed on as they are
    written if its name precedes them, which makes it a call even if they turn out malformed or truncated. Any other
    call is passed on when it is complete; until then, a malformed or truncated one is text. White space next to tags
    is dropped, up to 64 characters. The time is linear in the length of the answer: no text is read or copied for
    every piece.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._types = {tool.name: ArgumentTypes(tool.parameters) for tool in form.tools}
        self._text, self._at, self._is_over = bytearray(), 0, False  # UTF-8: grows in place, unlike a string
        self._found: list[Piece | Call | Arguments] = []
        self._is_reasoning = False
        self._space, self._is_after_tag = "", False
        self._is_in_arguments, self._is_dropped = False, False
        self.n_calls = 0
        self._steps = self._read()
        next(self._steps)

    def add(self, text: str, is_last: bool = False) -> list[Piece | Call | Arguments]:
        """Return the pieces and calls that `text` completes. Arguments follow their call."""
        self._text += text.encode()
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
            if (yield from (self._xml_call() if self._form.calls == "xml" else self._json_call())):
                self._pass_tag()
            else:
                self._put(self._text[begin : self._at].decode())
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
                self._put(self._text[begin : self._at].decode())
        if tag is not None:
            self._at += len(tag)
            self._pass_tag()

    def _more(self) -> Generator[None, None, bool]:
        """Wait for more text; return False if there is none."""
        if self._is_in_arguments:
            self._put_arguments(self._take())
        if not self._is_over:
            yield
            return True
        return False

    def _take(self) -> str:
        """Return the text before the current place, and keep only the rest."""
        taken = self._text[: self._at].decode()
        del self._text[: self._at]
        self._at = 0
        return taken

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

    def _put_call(self, name: str, arguments: str = "") -> None:
        """Pass on a call, unless it is one too many."""
        self._is_dropped = bool(self.n_calls) and not self._form.several
        if not self._is_dropped:
            self._found.append(Call(name, index=self.n_calls))
            self.n_calls += 1
            self._put_arguments(arguments)

    def _put_arguments(self, text: str) -> None:
        if text and not self._is_dropped:
            self._found.append(Arguments(text, self.n_calls - 1))

    def _until(self, *tags: str) -> Generator[None, None, str | None]:
        """Pass on the text before the first of `tags`, and return that tag; None if there is none."""
        while True:
            self._take()
            places = [(place, tag) for tag in tags if (place := self._text.find(tag.encode())) >= 0]
            self._at, tag = min(places, default=(len(self._text) - self._n_begun(tags), None))
            self._put(self._take())
            if tag is not None or not (yield from self._more()):
                break
        if tag is None:
            self._at = len(self._text)
            self._put(self._take())
        return tag

    def _n_begun(self, tags: tuple[str, ...]) -> int:
        """Return the length of the longest suffix of the text that is the beginning of a tag."""
        lengths = (n for tag in tags for n in range(1, len(tag)) if self._text.endswith(tag[:n].encode()))
        return max(lengths, default=0)

    def _find(self, tag: str) -> Generator[None, None, str | None]:
        """Move to the next `tag` and return it; None if there is none."""
        while (place := self._text.find(tag.encode(), self._at)) < 0:
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
                if self._text.startswith(word.encode(), begin):
                    self._at = begin + len(word)
                    return word
            rest = self._text[begin : begin + max(map(len, words))]
            if not any(word.encode().startswith(rest) for word in words) or not (yield from self._more()):
                return None

    def _json_call(self) -> Generator[None, None, bool]:
        """Read a call and pass it on; return whether there is one."""
        if (yield from self._literal("{")) is None:
            return False
        begin = self._at
        if (name := (yield from self._json_head())) is not None:
            self._put_call(name)
            self._at -= 1
            self._take()
            self._at, self._is_in_arguments = 1, True
            is_closed = yield from self._pass_nested()
            self._put_arguments(self._take())
            self._is_in_arguments = False
            if is_closed and not (yield from self._pass_nested()):  # other keys mean nothing
                self._at = 0
            while (yield from self._literal("}", END_CALL)) == "}":
                pass
            return True
        self._at = begin
        if not (yield from self._pass_nested()):
            return False
        text = self._text[begin - 1 : self._at].decode()
        call = _json_call(text) if (yield from self._literal(END_CALL)) is not None else None
        if call is not None:
            self._put_call(*call)
        return call is not None

    def _json_head(self) -> Generator[None, None, str | None]:
        """Read a call up to the brace that opens its arguments and return its name; None if they do not follow it."""
        for word in ('"name"', ":", '"'):
            if (yield from self._literal(word)) is None:
                return None
        if (name := (yield from self._name(_QUOTED_NAME))) is None:
            return None
        for words in ((",",), ('"arguments"', '"parameters"'), (":",), ("{",)):
            if (yield from self._literal(*words)) is None:
                return None
        return name

    def _pass_nested(self) -> Generator[None, None, bool]:
        """Move to the end of the JSON array or object whose bracket came last; return False if it is not closed."""
        depth = 1
        while depth:
            match = _STRUCTURE.search(self._text, self._at)
            self._at = len(self._text) if match is None else match.end()
            if match is None:
                if not (yield from self._more()):
                    return False
            elif match.group() == b'"':
                if not (yield from self._pass_string()):
                    return False
            elif match.group() == b"<":  # never valid JSON outside a string
                self._at -= 1
                return False
            else:
                depth += 1 if match.group() in b"{[" else -1
        return True

    def _pass_string(self) -> Generator[None, None, bool]:
        """Move to the end of a JSON string; return False if it is not closed."""
        while True:
            match = _STRING_END.search(self._text, self._at)
            self._at = len(self._text) if match is None else match.start()
            if match is None or (match.group() == b"\\" and match.end() == len(self._text)):
                if not (yield from self._more()):
                    return False
            elif match.group() == b"\n":
                return False
            else:
                self._at = match.end() + (match.group() == b"\\")
                if match.group() == b'"':
                    return True

    def _xml_call(self) -> Generator[None, None, bool]:
        """Read a call and pass it on; return whether there is one."""
        if (yield from self._literal(FUNCTION)) is None or (name := (yield from self._name())) is None:
            return False
        types, values = self._types.get(name) or ArgumentTypes({}), {}
        while (tag := (yield from self._literal(PARAMETER, END_FUNCTION))) == PARAMETER:
            if (key := (yield from self._name())) is None:
                return False
            if (value := (yield from self._value(types.of(key)))) is None:
                return False
            values[key] = value
        if tag is None or (yield from self._literal(END_CALL)) is None:
            return False
        self._put_call(name, json.dumps(types.convert(values), ensure_ascii=False))
        return True

    def _name(self, pattern: re.Pattern[bytes] = _NAME) -> Generator[None, None, str | None]:
        """Read a name and the bracket or quote after it; None if there is none."""
        while (match := pattern.match(self._text, self._at)) is not None:
            if match[2]:
                self._at = match.end()
                return match[1].decode()
            if not (yield from self._more()):
                break
        return None

    def _value(self, types: set[str]) -> Generator[None, None, str | None]:
        """Read a value and its closing tag, which counts only if another argument or the end of the call follows.

        An array or object ends where its JSON does: its strings may contain tags.
        """
        begin = self._at
        is_nested = types & {"array", "object"} and (yield from self._literal("{", "[")) is not None
        if is_nested and not (yield from self._pass_nested()):
            self._at = begin
        while (match := _VALUE_END.search(self._text, self._at)) is None:
            self._at = max(self._at, len(self._text) - _LONGEST_VALUE_END)
            if not (yield from self._more()):
                self._at = len(self._text)
                return None
        self._at = match.end()
        return self._text[begin : match.start()].decode().removeprefix("\n").removesuffix("\n")


def _json_call(text: str) -> tuple[str, str] | None:
    """Return the name and arguments of the call in a JSON text; None if it is not a valid call."""
    try:
        found = json.loads(text, parse_constant=refuse_constant)
        name, arguments = found.get("name"), found.get("arguments", found.get("parameters", {}))
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + written).encode()  # ValueError for an unpaired surrogate
        return name, written
    except (ValueError, RecursionError):
        return None
