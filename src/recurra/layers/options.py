"""Checks of the options that mixers with heads share."""

from collections.abc import Mapping
from typing import TypeVar

from recurra.layers.sizes import check_sizes

Choice = TypeVar("Choice")


def check_heads(d_model: int, d_qk: int, d_v: int, n_heads: int) -> None:
    """Check that the sizes are possible and that the heads divide the channels.

    Raises:
        ValueError: naming the size, what came and what was expected.
    """
    check_sizes(d_model=d_model, d_qk=d_qk, d_v=d_v, n_heads=n_heads)
    if d_qk % n_heads or d_v % n_heads:
        raise ValueError(f"n_heads is {n_heads}; it must divide d_qk = {d_qk} and d_v = {d_v}")


def choose(name: str, table: Mapping[str, Choice], choice: str) -> Choice:
    """Look up the value of option `name` in the table of what it may be.

    Raises:
        ValueError: the table does not have it; the message lists what there is.
    """
    if choice not in table:
        raise ValueError(f"{name} is {choice!r}; expected one of {', '.join(table)}")
    return table[choice]
