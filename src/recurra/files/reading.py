"""The one way to read text, JSON and YAML: within limits, and refused in one sentence that names the file.

A file may be damaged, cut, of another program or made to exhaust memory. So its size is looked at before it is read,
its depth before it is parsed, and YAML's aliases are counted as what they stand for.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import yaml

from recurra.checks import kind_of, sentence

MOST_BYTES = 4 * 2**20
"""Maximum size of a text or JSON file, unless the reader of a kind of file knows better."""

MOST_YAML_BYTES = 256 * 2**10
"""Maximum size of a YAML file: the parser is slow, and recipes are short."""

MOST_YAML_VALUES = 5_000
"""Maximum number of values in a YAML file, with every alias replaced by what it stands for."""

MOST_DEPTH = 64
"""Maximum number of lists and objects inside each other."""

MOST_DIGITS = 300
"""Maximum digits of a whole number: as a float it has to be finite."""

_SHOWN = 60  # characters of a key in a message
_LONGEST = 800  # characters of an error of a library
_NO_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[^\[\]{}"]+', re.DOTALL)  # strings, whole or cut, and the rest
_MERGE = "tag:yaml.org,2002:merge"
_JSON_NAMES = {"dict": "object", "list": "list"}


def read_text(path: Path, what: str = "", *, most_bytes: int = MOST_BYTES, mend: str = "") -> str:
    """Read a text file in UTF-8.

    Args:
        path: the file.
        what: what the file is, to stand before its name in messages, such as "the vocabulary".
        most_bytes: larger files are refused before they are read.
        mend: how to get a sound file, for messages.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large or not UTF-8.
    """
    name = _name(path, what)
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)  # never the whole of an endless device
        if len(data) > most_bytes:
            size = max(len(data), path.stat().st_size)
            raise ValueError(sentence(name, f"{size:,} bytes long", f"at most {most_bytes:,} bytes", mend))
    return _decoded(data, name, mend)


def read_json(
    path: Path,
    what: str = "",
    *,
    kind: type = dict,
    most_bytes: int = MOST_BYTES,
    allow_nan: bool = False,
    mend: str = "",
) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        what: what the file is, to stand before its name in messages.
        kind: the type of the whole, dict or list.
        most_bytes: larger files are refused before they are read.
        allow_nan: also read NaN and Infinity, which are not JSON.
        mend: how to get a sound file, for messages.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, too deep, no JSON in UTF-8, not a `kind`, or has a key twice in one object.
    """
    text = read_text(path, what, most_bytes=most_bytes, mend=mend)
    return parse_json(text, _name(path, what), kind=kind, allow_nan=allow_nan, mend=mend)


def parse_json(text: str | bytes, name: str, *, kind: type = dict, allow_nan: bool = False, mend: str = "") -> Any:
    """Read JSON from a text that is called `name` in messages; otherwise as `read_json`.

    Raises:
        ValueError: as `read_json`.
    """
    expected = f"a JSON {_JSON_NAMES[kind.__name__]}"
    if isinstance(text, bytes):
        text = _decoded(text, name, mend)
    constant = float if allow_nan else _refuse_constant
    number = float if allow_nan else _finite
    try:
        _require_shallow(text)
        content = json.loads(
            text, object_pairs_hook=_without_twins, parse_constant=constant, parse_float=number, parse_int=_short_int
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(sentence(name, f"not readable as JSON ({one_line(error)})", expected, mend)) from error
    if not isinstance(content, kind):
        raise ValueError(sentence(name, f"JSON, but {kind_of(content)}", expected, mend))
    return content


def read_yaml(path: Path, what: str = "", *, most_bytes: int = MOST_YAML_BYTES, mend: str = "") -> dict[str, Any]:
    """Read a YAML file of keys and values.

    Args:
        path: the file.
        what: what the file is, to stand before its name in messages.
        most_bytes: larger files are refused before they are read.
        mend: how to get a sound file, for messages.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, too deep, no YAML in UTF-8, not keys and values, has a key twice or one that is
            not a string, or its aliases stand for too much or for themselves.
    """
    text = read_text(path, what, most_bytes=most_bytes, mend=mend)
    content: dict[str, Any] = parse_yaml(text, _name(path, what), kind=dict, mend=mend)
    return content


def parse_yaml(text: str, name: str, *, kind: type | None = None, mend: str = "") -> Any:
    """Read YAML from a text that is called `name` in messages, of any type unless `kind` is given.

    Raises:
        ValueError: as `read_yaml`.
    """
    expected = "keys and values in YAML" if kind is dict else "YAML"
    try:
        content = yaml.load(text, _BoundedLoader)
    # PyYAML lets the errors of its constructors through: !!bool x is a KeyError, 2001-99-99 a ValueError.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(sentence(name, f"not readable as YAML ({one_line(error)})", expected, mend)) from error
    if kind is not None and not isinstance(content, kind):
        raise ValueError(sentence(name, f"YAML, but {kind_of(content)}", expected, mend))
    return content


class _BoundedLoader(yaml.SafeLoader):
    """Counts values, depth and what aliases stand for as the events come, before anything is made of them."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._n_values = 0
        self._open: list[tuple[str | None, int]] = []  # anchors of the open collections, and values before them
        self._sizes: dict[str | None, int] = {}  # by anchor; of those without one, any

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        super().fetch_flow_collection_start(token_class)
        # Before there are events: the scanner looks far ahead for the end of a key.
        if self.flow_level > MOST_DEPTH:
            raise yaml.YAMLError(f"more than {MOST_DEPTH} levels deep")

    def get_event(self) -> Any:
        event = super().get_event()
        if isinstance(event, yaml.CollectionStartEvent):
            self._open.append((event.anchor, self._n_values))
            self._count(1)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = self._open.pop()
            self._sizes[anchor] = self._n_values - before
        elif isinstance(event, yaml.ScalarEvent):
            self._sizes[event.anchor] = 1
            self._count(1)
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in self._open):
                raise yaml.YAMLError(f"the alias *{event.anchor} stands for itself")
            self._count(self._sizes.get(event.anchor, 0))  # the composer refuses an alias without an anchor
        return event

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        # Before merge keys are resolved: they may bring in keys that the mapping itself overrides.
        if isinstance(node, yaml.MappingNode):
            keys = [key for key, _ in node.value if key.tag != _MERGE]
            _without_twins([(self.construct_object(key, deep=True), None) for key in keys])
        mapping = super().construct_mapping(node, deep=deep)
        for key in mapping:
            if not isinstance(key, str):
                raise yaml.YAMLError(f"the key {_shortened(key)} is {kind_of(key)}, not a string")
        return mapping

    def construct_yaml_int(self, node: Any) -> int:
        return _within_digits(super().construct_yaml_int(node))

    def _count(self, n: int) -> None:
        self._n_values += n
        if self._n_values > MOST_YAML_VALUES:
            raise yaml.YAMLError(f"more than {MOST_YAML_VALUES:,} values")
        if len(self._open) > MOST_DEPTH:
            raise yaml.YAMLError(f"more than {MOST_DEPTH} levels deep")


_BoundedLoader.add_constructor("tag:yaml.org,2002:int", _BoundedLoader.construct_yaml_int)


def _name(path: Path, what: str) -> str:
    return f"{what} {path}" if what else str(path)


def _decoded(data: bytes, name: str, mend: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        came = f"not UTF-8 (byte {error.start} is {data[error.start]:#04x})"
        raise ValueError(sentence(name, came, "text in UTF-8", mend)) from error


def _require_shallow(text: str) -> None:
    """Refuse brackets inside each other beyond MOST_DEPTH, without recursion; those in strings do not count."""
    depth = 0
    for bracket in _NO_BRACKETS.sub("", text):
        depth += 1 if bracket in "[{" else -1
        if depth > MOST_DEPTH:
            raise ValueError(f"more than {MOST_DEPTH} levels deep")


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
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def _within_digits(number: int) -> int:
    if abs(number) >= 10**MOST_DIGITS:
        raise ValueError(f"a number has more than {MOST_DIGITS} digits")
    return number


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def one_line(error: BaseException) -> str:
    """Write an error of a library in one line that is not too long; some quote whole files."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
