"""JSON schemas of the arguments of tools: the types that they name."""

import json
from typing import Any

_MOST_SCHEMAS = 10_000
"""That are looked at for the types of one argument."""


def typed(values: dict[str, str], schema: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with the types of their schema. A text that is no value of its types stays a text."""
    known = schema.get("properties")
    known = known if isinstance(known, dict) else {}
    return {key: _typed(text, types_of(known.get(key), schema)) for key, text in values.items()}


def _typed(text: str, types: set[str]) -> Any:
    if types <= {"string"}:
        return text
    words = {"True": True, "False": False, "None": None}  # which templates write for values in earlier calls
    try:
        value = words[text.strip()] if text.strip() in words else json.loads(text, parse_constant=refuse_constant)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) or ("string" in types and not _type_of(value) & types) else value


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _type_of(value: Any) -> set[str]:
    """Return JSON schema's words for the type of a value."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}


def types_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """Return the types that a schema names; none if it leaves them open. The time is linear in the schema's size."""
    found: set[str] = set()
    waiting, seen = [schema], set()
    for _ in range(_MOST_SCHEMAS):
        if not waiting:
            break
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        options: list[Any] = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), [])
        if isinstance(where := schema.get("$ref"), str):
            waiting.append(_referred(where, root))
        elif isinstance(named := schema.get("type"), (str, list)):
            found.update([named] if isinstance(named, str) else (one for one in named if isinstance(one, str)))
        elif isinstance(values, list):
            found.update(*map(_type_of, values))
        else:
            waiting += options
    return found


def resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Follow references to definitions of the same schema."""
    for _ in range(8):
        if not isinstance(schema, dict) or not isinstance(where := schema.get("$ref"), str):
            break
        schema = _referred(where, root)
    return schema


def _referred(where: str, root: dict[str, Any]) -> Any:
    """Return what a reference leads to: None if it is not in the schema itself."""
    found: Any = root
    for step in where.split("/")[1:]:
        found = found.get(step) if isinstance(found, dict) else None
    return found if where.startswith("#") else None
