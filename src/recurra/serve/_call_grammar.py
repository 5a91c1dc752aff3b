"""Grammars for answers with tool calls whose arguments must match their schemas.

In a JSON call, the arguments are one object, for which llguidance compiles the schema. In an XML call, each argument
is separate: strings are written without quotes, everything else as JSON. Conditions on such a string, or on several
arguments together, cannot be enforced and are refused.
"""

import json
import re
from typing import Any

from recurra.checks import sentence
from recurra.serve._grammar import WHITESPACE, Lark
from recurra.serve._http import ApiError
from recurra.serve._schemas import ArgumentTypes, require_finite, resolved
from recurra.serve._tools import (
    CALL,
    END_CALL,
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    PARAMETER,
    AnswerForm,
    Tool,
)

_NOTES = {"$comment", "default", "deprecated", "description", "examples", "nullable", "title", "type"}
"""Keywords that do not constrain a string."""
_OF_OBJECTS = {*_NOTES, "$defs", "$id", "$schema", "additionalProperties", "definitions", "properties", "required"}
"""Keywords of a schema whose arguments can be written one by one."""
_SCALARS = {"string", "null", "integer", "number", "boolean"}
_KEY = re.compile(r"[^<>\n]{1,200}")


def calls_grammar(form: AnswerForm, ends: list[str]) -> Lark | None:
    """Return the grammar of an answer; None unless a tool must be called or is strict.

    ends: strings of several tokens that end an answer. Raises ApiError for unsupported schemas.
    """
    if form.calls is None or not (form.is_forced or any(tool.strict for tool in form.tools)):
        return None
    rules, names = [], []
    for index, tool in enumerate(form.tools):
        schema = tool.parameters if form.is_forced or tool.strict else None
        if schema is not None:
            require_finite(f"the schema of {tool.name}", {**schema, "type": "object"}, "tools")
        name = f"call_{index}"
        names.append(name)
        if form.calls == "json":
            rules.append(_json_rule(name, tool.name, {} if schema is None else schema))
        else:
            rules += _xml_rules(name, tool, schema)
    end = f" ({' | '.join(map(_text, ends))})?" if ends else ""
    several = f' ("\\n" {_text(CALL)} call)*' if form.several else ""
    if form.is_forced:
        start = f"{_text(CALL)} call{several}{end}"
    else:
        start = "(before call)* text" if form.several else "before call | text"
    own = [f"start: {start}", r"text: /(.|\n)*/", f"before[lazy]: /(.|\\n)*{CALL}/", f"call: {' | '.join(names)}"]
    return Lark("\n".join([*own, r"value[lazy]: /(.|\n)*<\/parameter>/", *rules]))


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any) -> str:
    """Return the rule for a value as JSON, with limited white space."""
    if isinstance(schema, dict):
        options = schema.get("x-guidance")
        known = options if isinstance(options, dict) else {}
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, **known}}
    return f"%json {json.dumps(schema)}"


def _json_rule(name: str, function: str, schema: dict[str, Any]) -> str:
    begin, end = f'\n{{"name": {_text(function)}, "arguments": ', f"}}\n{END_CALL}"
    return f"{name}: {_text(begin)} {_json({**schema, 'type': 'object'})} {_text(end)}"


def _xml_rules(name: str, tool: Tool, schema: dict[str, Any] | None) -> list[str]:
    """Return the rules of a call, with arguments in the schema's order; if `schema` is None, any arguments."""
    begin, end = _text(f"\n{FUNCTION}{tool.name}>\n"), _text(f"{END_FUNCTION}\n{END_CALL}")
    if schema is None:
        argument = f'{_text(PARAMETER)} /[A-Za-z0-9_.-]{{1,64}}/ ">\\n" value "\\n"'
        return [f"{name}: {begin} ({argument})* {end}"]
    if unknown := set(schema) - _OF_OBJECTS:
        raise _refused(tool.name, f"an object with {min(unknown)!r}", "only 'properties' and 'required'")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    names = required if isinstance(required, list) else [None]
    if not isinstance(properties, dict) or not all(isinstance(key, str) for key in names):
        raise _refused(tool.name, "not a JSON schema", "an object 'properties' and a list 'required'")
    properties = {**properties, **{key: {} for key in required if key not in properties}}
    rules, parts, types = [], [], ArgumentTypes(schema)
    for index, (key, of_key) in enumerate(properties.items()):
        if not _KEY.fullmatch(key):
            raise _refused(tool.name, f"one with a parameter {key!r}", "names without <, > and line breaks")
        parts.append(f"{name}_{index}{'' if key in required else '?'}")
        value = _value(of_key, schema, types.allowed(of_key), f"{tool.name}.{key}")
        rules.append(f"{parts[-1].rstrip('?')}: {_text(f'{PARAMETER}{key}>')} {value}")
    return [f"{name}: {begin} {' '.join(parts)} {end}", *rules]


def _value(schema: Any, root: dict[str, Any], types: set[str], which: str) -> str:
    """Return the rule for an argument's value and its closing tag."""
    found = {} if schema is True else resolved(schema, root)
    several = [found.get(key, []) for key in ("anyOf", "oneOf")] if isinstance(found, dict) else [None]
    options = [found, *(resolved(one, root) for some in several if isinstance(some, list) for one in some)]
    if not all(isinstance(some, list) for some in several) or not all(map(_may_be_schema, options)):
        raise _refused(which, "not a JSON schema", "an object whose 'anyOf' and 'oneOf' are lists of schemas")
    after = _text(f"\n{END_PARAMETER}\n")
    values = found.get("enum", [found["const"]] if "const" in found else None)
    if values and isinstance(values, list):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        if tag := next((tag for tag in (END_PARAMETER, END_FUNCTION) if any(tag in text for text in texts)), None):
            raise _refused(which, f"one that allows a value with {tag}", "values without it")  # the end of a value
        return f'"\\n" ({" | ".join(map(_text, texts))}) {after}'
    if types and "string" not in types:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f'"\\n" {_json({**schema, **definitions})} {after}'
    keywords = set().union(*options) - _NOTES - {"anyOf", "oneOf"}
    if keywords or not types <= _SCALARS:
        got = f"a string with {min(keywords)!r}" if keywords else "a string, an array or an object"
        raise _refused(which, got, "a string without conditions")
    return '"\\n" value "\\n"'


def _may_be_schema(schema: Any) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("type", ""), (str, list))


def _refused(which: str, got: str, expected: str) -> ApiError:
    hint = "this model writes arguments as XML; any schema is accepted without strict and with tool_choice 'auto'"
    return ApiError(400, sentence(f"the schema of {which}", got, expected, hint), param="tools")
