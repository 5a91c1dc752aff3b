"""JSON schemas of answers: the types they allow, and schemas that no finite value can satisfy."""

import json
from typing import Any
from urllib.parse import unquote

from recurra.checks import sentence
from recurra.serve._http import ApiError

_MOST_SCHEMAS = 10_000
"""Limit on the schemas searched for the types of one argument."""


def _typed(text: str, types: set[str]) -> Any:
    if types <= {"string"}:
        return text
    words = {"True": True, "False": False, "None": None}  # Python's spelling, which templates use in earlier calls
    try:
        value = words[text.strip()] if text.strip() in words else json.loads(text, parse_constant=refuse_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # refuses unpaired surrogates
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) or ("string" in types and not _type_of(value) & types) else value


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def _type_of(value: Any) -> set[str]:
    """Return the JSON schema types of a value."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}


class ArgumentTypes:
    """The types that the schema of a tool's arguments allows; each is looked up once, however many calls there are."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._root = schema
        self._of_arguments: dict[str, set[str]] = {}

    def of(self, name: str) -> set[str]:
        """Return the types of an argument; empty if any fits."""
        if name not in self._of_arguments:
            known = self._root.get("properties")
            self._of_arguments[name] = self.allowed(known.get(name) if isinstance(known, dict) else None)
        return self._of_arguments[name]

    def convert(self, texts: dict[str, str]) -> dict[str, Any]:
        """Convert arguments to their types. A text that cannot be converted stays a string."""
        return {name: _typed(text, self.of(name)) for name, text in texts.items()}

    def allowed(self, schema: Any) -> set[str]:
        """Return the types that a part of the schema allows; empty if it does not restrict them. Linear time."""
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
            lists = (schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list))
            if isinstance(where := schema.get("$ref"), str):
                waiting.append(_referred(where, self._root))
            elif isinstance(named := schema.get("type"), (str, list)):
                found.update([named] if isinstance(named, str) else (one for one in named if isinstance(one, str)))
            elif isinstance(values, list):
                found.update(*map(_type_of, values))
            else:
                waiting += next(lists, [])
        return found


def resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Follow references to definitions of the same schema."""
    for _ in range(8):
        if not isinstance(schema, dict) or not isinstance(where := schema.get("$ref"), str):
            break
        schema = _referred(where, root)
    return schema


def require_finite(name: str, schema: Any, param: str) -> None:
    """Raise ApiError if no finite value can satisfy a part of the schema, which the message calls `name`."""
    if (place := endless(schema)) is not None:
        got, expected = f"infinitely recursive at {place}", "a schema that a finite value can satisfy"
        hint = "make a property on the way back to it optional, or give it an alternative"
        raise ApiError(400, sentence(name, got, expected, hint), param=param)


def endless(schema: Any) -> str | None:
    """Return the path to a part of the schema that no finite value can satisfy; None if there is none. Linear time.

    Such a part requires itself through references, alternatives and required members. Its grammar never terminates.
    """
    root = schema if isinstance(schema, dict) else {}
    origins: dict[int, tuple[int, str]] = {id(schema): (0, "#")}  # each schema's parent, and its name there
    waiting = [schema]
    n_open: dict[int, int] = {}  # a schema's requirements not yet known to be finite
    users: dict[int, list[tuple[int, int]]] = {}
    while waiting:
        parent = waiting.pop()
        needs, others = _parts(parent, root)
        n_open[id(parent)] = len(needs)
        for which, alternatives in enumerate([*needs, others]):
            for name, part in alternatives:
                users.setdefault(id(part), []).extend([(id(parent), which)] if which < len(needs) else [])
                if id(part) not in origins:
                    origins[id(part)] = id(parent), name
                    waiting.append(part)
    finite, met = [one for one, n in n_open.items() if not n], set()
    for one in finite:  # grows during the loop
        for user in users.get(one, ()):
            if user not in met:
                met.add(user)
                n_open[user[0]] -= 1
                finite += [] if n_open[user[0]] else [user[0]]
    at, names = next((one for one in reversed(n_open) if n_open[one]), 0), []
    while at:
        at, name = origins[at]
        names.append(name)
    return "".join(reversed(names)) or None


_Parts = list[tuple[str, Any]]


def _parts(schema: Any, root: dict[str, Any]) -> tuple[list[_Parts], _Parts]:
    """Return the parts a schema requires (lists of alternatives, one of which must be finite) and its other parts.

    Each part comes with its path. A schema of several types requires no members: its value may have another type.
    """
    if not isinstance(schema, dict):
        return [], []
    tables = {key: schema[key] for key in ("properties", "patternProperties") if isinstance(schema.get(key), dict)}
    others = [(f"/{key}/{name}", part) for key, table in tables.items() for name, part in table.items()]
    for key in ("additionalProperties", "items"):
        others.append((f"/{key}", schema.get(key)))
    lists = {
        key: schema[key] for key in ("allOf", "anyOf", "oneOf", "prefixItems") if isinstance(schema.get(key), list)
    }
    indexed = {key: [(f"/{key}/{n}", part) for n, part in enumerate(some)] for key, some in lists.items()}
    needs = [[one] for one in indexed.get("allOf", [])] + [indexed[key] for key in ("anyOf", "oneOf") if lists.get(key)]
    if isinstance(where := schema.get("$ref"), str):
        needs.append([("", _referred(where, root))])
    kind, least = schema.get("type"), schema.get("minItems")
    if kind in ("object", ["object"]) and isinstance(schema.get("required"), list):
        members, rest = tables.get("properties", {}), schema.get("additionalProperties")
        names = [name for name in schema["required"] if isinstance(name, str)]
        needs += [[(f"/properties/{name}", members.get(name, rest))] for name in names]
    first = indexed.get("prefixItems", [])
    if kind in ("array", ["array"]) and isinstance(least, int) and least > 0:
        needs += [[one] for one in first[:least]]
        needs += [[("/items", schema.get("items"))]] if least > len(first) else []
    return needs, others + first


def _referred(where: str, root: dict[str, Any]) -> Any:
    """Return the target of a reference; None if it is not within the same schema."""
    base, _, pointer = where.partition("#")
    first, *steps = pointer.split("/")
    found: Any = root if base in ("", root.get("$id")) and not first else None  # first: the name of an anchor
    for step in steps:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(step)] if step.isdecimal() and len(step) < 9 and int(step) < len(found) else None
        else:
            found = found.get(step) if isinstance(found, dict) else None
    return found
