"""Numbers that no parameter of a kind can have: 0 and -1 for a count, NaN, -1 and infinity for a measure."""

import math
import types
import typing
from collections.abc import Iterator
from typing import Any


def wrong_numbers(hint: Any) -> Iterator[float]:
    """Give those for a parameter with this type hint."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    yield from (0, -1) if int in kinds else ()
    yield from (math.nan, -1.0, math.inf) if float in kinds else ()
