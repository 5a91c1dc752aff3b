"""Plain data from a file, compared with the types that were declared for them."""

import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from recurra.checks import kind_of, sentence

_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def require_fields(content: Mapping[str, Any], types: Mapping[str, Any], name: str, *, finite: bool = True) -> None:
    """Compare those keys of an object that have a declared type with it; other keys pass.

    Args:
        content: an object as JSON gives it.
        types: the types by key, as `get_type_hints` gives them: int, float, str, bool, None, Any, lists, dictionaries
            with strings as keys, and unions of these.
        name: what the object is, for the message.
        finite: refuse numbers that are not finite.

    Raises:
        ValueError: naming the object and the first key that does not fit.
    """
    for key, value in content.items():
        if key in types:
            try:
                _require(value, types[key], key, finite)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error


def _require(value: Any, hint: Any, name: str, finite: bool) -> None:
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        choices = [choice for choice in inside if choice is not NoneType]
        if value is None and len(choices) < len(inside):
            return
        # Of numbers, the widest; else there is one.
        _require(value, float if float in choices else choices[0], name, finite)
    elif kind is dict:
        _require_kind(isinstance(value, dict), name, value, "an object")
        for key, item in value.items():
            _require(item, inside[1] if inside else Any, f"{name}.{key}", finite)
    elif kind is list:
        _require_kind(isinstance(value, list), name, value, "a list")
        for place, item in enumerate(value):
            _require(item, inside[0] if inside else Any, f"{name}[{place}]", finite)
    elif kind is not Any:
        is_number = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
        _require_kind(is_number if kind in (int, float) else isinstance(value, kind), name, value, _NAMES[kind])
        if finite and kind is float and not math.isfinite(value):
            raise ValueError(sentence(name, repr(value), "a finite number"))


def _require_kind(fits: bool, name: str, value: object, expected: str) -> None:
    if not fits:
        raise ValueError(sentence(name, kind_of(value), expected))
