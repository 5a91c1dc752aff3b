"""The one way to read text, JSON and YAML: within limits, and refused in one sentence that names the file.

A file may be damaged, cut, of another program or made to exhaust memory. So its size is looked at before it is read,
and its depth before it is parsed.
"""

import json
import math
import re
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from recurra.checks import kind_of, sentence

MOST_BYTES = 4 * 2**20
"""Maximum size of a text or JSON file, unless the reader of a kind of file knows better."""

_MOST_YAML_BYTES = 256 * 2**10
"""Maximum size of a YAML file: the parser is slow, and recipes are short."""

_MOST_DEPTH = 64
"""Maximum number of lists and objects inside each other."""

_MOST_DIGITS = 300
"""Maximum digits of a whole number: as a float it has to be finite."""

_SHOWN = 60  # characters of a key in a message
_LONGEST = 800  # characters of an error of a library
_NO_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[^\[\]{}"]+', re.DOTALL)  # strings, whole or cut, and the rest
_JSON_NAMES = {"dict": "object", "list": "list"}


def read_text(path: Path, what: str = "", *, most_bytes: int = MOST_BYTES, hint: str = "") -> str:
    """Read a text file in UTF-8.

    what: what the file is, to stand before its name in messages. hint: how to get a sound file, for messages.
    """
    name = _name(path, what)
    require_file(path, what)
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            size = max(len(data), path.stat().st_size)
            raise ValueError(sentence(name, f"{size:,} bytes long", f"at most {most_bytes:,} bytes", hint))
    return _decoded(data, name, hint)


def read_json(
    path: Path,
    what: str = "",
    *,
    kind: type = dict,
    most_bytes: int = MOST_BYTES,
    allow_nan: bool = False,
    hint: str = "",
) -> Any:
    """Read a JSON file, otherwise as `read_text`.

    kind: the type of the whole, dict or list. allow_nan: also read NaN and Infinity, which are not JSON.
    """
    text = read_text(path, what, most_bytes=most_bytes, hint=hint)
    return parse_json(text, _name(path, what), kind=kind, allow_nan=allow_nan, hint=hint)


def parse_json(text: str | bytes, name: str, *, kind: type = dict, allow_nan: bool = False, hint: str = "") -> Any:
    """Read JSON from a text that is called `name` in messages; otherwise as `read_json`."""
    expected = f"a JSON {_JSON_NAMES[kind.__name__]}"
    if isinstance(text, bytes):
        text = _decoded(text, name, hint)
    constant = float if allow_nan else _refuse_constant
    number = float if allow_nan else _finite
    try:
        _require_shallow(text)
        content = json.loads(
            text, object_pairs_hook=_without_twins, parse_constant=constant, parse_float=number, parse_int=_short_int
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(sentence(name, f"not readable as JSON ({one_line(error)})", expected, hint)) from error
    if not isinstance(content, kind):
        raise ValueError(sentence(name, f"JSON, but {kind_of(content)}", expected, hint))
    return content


def read_yaml(path: Path, what: str = "") -> dict[str, Any]:
    """Read a YAML file of keys and values, otherwise as `read_text`."""
    text = read_text(path, what, most_bytes=_MOST_YAML_BYTES)
    content: dict[str, Any] = parse_yaml(text, _name(path, what), kind=dict)
    return content


def parse_yaml(text: str, name: str, *, kind: type | None = None) -> Any:
    """Read YAML from a text that is called `name` in messages, of any type unless `kind` is given."""
    import yaml  # of the extra train: the core reads JSON alone

    expected = "keys and values in YAML" if kind is dict else "YAML"
    try:
        content = yaml.load(text, _yaml_loader())
    # PyYAML lets the errors of its constructors through: !!bool x is a KeyError, 2001-99-99 a ValueError.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(sentence(name, f"not readable as YAML ({one_line(error)})", expected)) from error
    if kind is not None and not isinstance(content, kind):
        raise ValueError(sentence(name, f"YAML, but {kind_of(content)}", expected))
    return content


@cache
def _yaml_loader() -> Any:
    """Make the class that reads plain data without aliases, which can stand for any amount, or repeated keys."""
    import yaml

    class Loader(yaml.SafeLoader):
        _depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError(f"the alias *{self.peek_event().anchor}, which has to be written out")
            self._depth += 1
            if self._depth > _MOST_DEPTH:
                raise yaml.YAMLError(f"more than {_MOST_DEPTH} levels deep")
            node = super().compose_node(parent, index)
            self._depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            pairs = [tuple(self.construct_object(item, deep=True) for item in pair) for pair in node.value]
            for key, _ in pairs:
                if not isinstance(key, str):
                    raise yaml.YAMLError(f"the key {_shortened(key)} is {kind_of(key)}, not a string")
            return _without_twins(pairs)

    return Loader


def require_file(path: Path, what: str = "") -> None:
    """Refuse a pipe, a socket or a device: whoever opens or reads one may wait for ever. Raises OSError if missing.

    A folder passes: the system's own error names it.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise ValueError(sentence(_name(path, what), f"a {kind}", "a file on a disk"))


def _name(path: Path, what: str) -> str:
    return f"{what} {path}" if what else str(path)


def _decoded(data: bytes, name: str, hint: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"not UTF-8 (byte {error.start} is {data[error.start]:#04x})"
        raise ValueError(sentence(name, got, "text in UTF-8", hint)) from error


def _require_shallow(text: str) -> None:
    """Refuse brackets inside each other beyond MOST_DEPTH, without recursion; those in strings do not count."""
    depth = 0
    for bracket in _NO_BRACKETS.sub("", text):
        depth += 1 if bracket in "[{" else -1
        if depth > _MOST_DEPTH:
            raise ValueError(f"more than {_MOST_DEPTH} levels deep")


def _without_twins(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {_shortened(key)} is there twice")
            seen.add(key)
    return content


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {_shortened(digits)} is too large")
    return number


def _short_int(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def one_line(error: BaseException) -> str:
    """Write an error of a library in one line that is not too long; some quote whole files."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


_NAMES = {int: "a whole number", float: "a number", str: "a string", dict: "an object"}


def require_fields(content: Mapping[str, Any], types: Mapping[str, Any], name: str) -> None:
    """Check the values of a JSON object against the types declared for their keys; messages call the object `name`.

    types: each is int, float, str, a dictionary with values of one of these or Any, or a union of one with None; keys
    without a type are not checked.
    """
    for key, value in content.items():
        if key in types:
            try:
                _require(value, types[key], key)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error


def _require(value: Any, hint: Any, name: str) -> None:
    hints = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if value is None and NoneType in hints:
        return
    (hint,) = (one for one in hints if one is not NoneType)
    kind = get_origin(hint) or hint
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise ValueError(sentence(name, kind_of(value), _NAMES[kind]))
    if isinstance(value, dict) and get_args(hint)[1] is not Any:
        for key, item in value.items():
            _require(item, get_args(hint)[1], f"{name}.{key}")
