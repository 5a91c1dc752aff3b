"""The one way to read text, JSON and YAML: what cannot be read is refused in one sentence that names the file."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from recurra.checks import kind_of, sentence

_LONGEST = 800  # characters of an error of a library
_JSON_NAMES = {"dict": "object", "list": "list"}


def read_text(path: Path, what: str = "", *, hint: str = "") -> str:
    """Read a text file in UTF-8.

    what: what the file is, to stand before its name in messages. hint: how to get a sound file, for messages.
    """
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"not UTF-8 (byte {error.start} is {data[error.start]:#04x})"
        raise ValueError(sentence(_name(path, what), got, "text in UTF-8", hint)) from error


def read_json(path: Path, what: str = "", *, kind: type = dict, hint: str = "") -> Any:
    """Read a JSON file, otherwise as `read_text`; kind: the type of the whole, dict or list."""
    return parse_json(read_text(path, what, hint=hint), _name(path, what), kind=kind, hint=hint)


def parse_json(text: str, name: str, *, kind: type = dict, hint: str = "") -> Any:
    """Read JSON from a text that is called `name` in messages; otherwise as `read_json`."""
    expected = f"a JSON {_JSON_NAMES[kind.__name__]}"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(sentence(name, f"not readable as JSON ({one_line(error)})", expected, hint)) from error
    if not isinstance(content, kind):
        raise ValueError(sentence(name, f"JSON, but {kind_of(content)}", expected, hint))
    return content


def read_yaml(path: Path, what: str = "") -> dict[str, Any]:
    """Read a YAML file of keys and values, otherwise as `read_text`."""
    content: dict[str, Any] = parse_yaml(read_text(path, what), _name(path, what), kind=dict)
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
    """Make the class that reads plain data, without aliases and without a key that is there twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # a change of one place would change the other
                raise yaml.YAMLError(f"the alias *{self.peek_event().anchor}, which has to be written out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            content: dict[Any, Any] = {}
            for pair in node.value:
                key, value = (self.construct_object(item, deep=True) for item in pair)
                if not isinstance(key, str):
                    raise yaml.YAMLError(f"the key {key!r} is {kind_of(key)}, not a string")
                if key in content:
                    raise yaml.YAMLError(f"the key {key!r} is there twice")
                content[key] = value
            return content

    return Loader


def _name(path: Path, what: str) -> str:
    return f"{what} {path}" if what else str(path)


def one_line(error: BaseException) -> str:
    """Write an error of a library in one line that is not too long; some quote whole files."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
