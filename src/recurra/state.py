"""Recurrent states: any nesting of NamedTuples, tuples and lists over tensors, numbers and None.

A state is passed in and returned, never kept on a module and never changed in place. These functions give back a new
state of the same structure. Whether gradients flow across a border is the caller's decision: `detach` makes the cut.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


def map_tensors(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply `function` to every tensor of `state` and return the same structure.

    Raises:
        TypeError: when `state` holds something else than tensors, numbers, None, tuples and lists.
    """
    return _map(function, state)


def _map(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    if isinstance(state, Tensor):
        return function(state)
    if state is None or isinstance(state, (int, float, bool)):
        return state
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(_map(function, item) for item in state))
    if isinstance(state, (tuple, list)):
        return type(state)(_map(function, item) for item in state)
    raise TypeError(
        f"a state holds tensors, numbers and None in (named) tuples and lists; it came with {type(state).__name__}"
    )


def tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors of `state`, depth first, in a fixed order."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (tuple, list)):
        for item in state:
            yield from tensors(item)


def detach(state: State) -> State:
    """Cut the gradients that flow through `state`: the border of truncated back-propagation through time."""
    return map_tensors(Tensor.detach, state)


def select(state: State, index: Tensor | slice) -> State:
    """Take streams out of a batched state: `index` selects along dimension 0 of every tensor.

    Args:
        state: a state whose tensors carry the batch in dimension 0.
        index: a slice, or a tensor of indices or booleans over the batch.
    """
    return map_tensors(lambda tensor: tensor[index], state)


def to(state: State, device: torch.device | str) -> State:
    """Move every tensor of `state` to `device`."""
    return map_tensors(lambda tensor: tensor.to(device), state)


def n_bytes(state: Any) -> int:
    """Count the bytes that the tensors of `state` hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(state))
