"""Recurrent states: any nesting of NamedTuples, tuples and lists over tensors, numbers and None.

A state is passed in and returned, never kept on a module and never changed in place. These functions give back a new
state of the same structure. Whether gradients flow across a border is the caller's decision: `detach` makes the cut.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


class Rows(NamedTuple):
    """The state of a batch whose rows stand at different places, so that their tensors differ in shape.

    It takes the place of a module's state where rows of different lengths leave states whose layout depends on the
    position: on how full a window is, say, or on the place in a segment. The module goes on from it as from any other.
    """

    rows: tuple[Any, ...]
    """One state of batch 1 for every row."""


def map_tensors(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply `function` to every tensor of `state` and return the same structure.

    Raises:
        TypeError: when `state` holds something else than tensors, numbers, None, tuples and lists.
    """
    return _map(function, state)


def _map(function: Callable[[Tensor], Any], state: Any, of_rows: Callable[[Rows], Any] | None = None) -> Any:
    if isinstance(state, Tensor):
        return function(state)
    if state is None or isinstance(state, (int, float, bool)):
        return state
    if isinstance(state, Rows) and of_rows is not None:
        return of_rows(state)
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(_map(function, item, of_rows) for item in state))
    if isinstance(state, (tuple, list)):
        return type(state)(_map(function, item, of_rows) for item in state)
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

    def of_rows(state: Rows) -> Any:
        numbers = torch.arange(len(state.rows))[index.cpu() if isinstance(index, Tensor) else index].tolist()
        return batch([state.rows[number] for number in numbers]) if numbers else select(state.rows[0], slice(0))

    return _map(lambda tensor: tensor[index], state, of_rows)


def n_streams(state: Any) -> int | None:
    """Count the streams that a batched state is of; None where it has no tensor to say so."""
    if isinstance(state, Tensor):
        return state.shape[0]
    if isinstance(state, Rows):
        return len(state.rows)
    counts = (n_streams(item) for item in state) if isinstance(state, (tuple, list)) else ()
    return next((count for count in counts if count is not None), None)


def layout(state: Any) -> Hashable:
    """Describe `state` but for its batch: structure, numbers, and the tensors' types, devices and other dimensions.

    States of equal layouts, and no others, can be concatenated.
    """
    if isinstance(state, Tensor):
        return state.dtype, state.device, state.shape[1:]
    if isinstance(state, (tuple, list)):
        return type(state), tuple(layout(item) for item in state)
    return type(state), state


def concatenate(states: Sequence[State]) -> State:
    """Put streams side by side in one batched state, along dimension 0 of every tensor; `split` is the way back.

    Args:
        states: one or more of the same layout. A segment-level model's are of one when the streams stand at the same
            place of their segments.

    Raises:
        ValueError: there is none, the layouts differ, or there are `Rows`, which `batch` puts together.
    """
    if not states:
        raise ValueError("states is empty; expected at least one state to concatenate")
    if any(_has_rows(state) for state in states):
        raise ValueError(
            "a state is of rows at different places: split the states, and concatenate those that are of one layout"
        )
    first = layout(states[0])
    for number, state in enumerate(states):
        if layout(state) != first:
            raise ValueError(
                f"state {number} has another layout than state 0, and only equal ones can be concatenated: "
                f"{layout(state)} against {first}"
            )
    columns = [list(tensors(state)) for state in states]
    batched = iter([torch.cat(column) for column in zip(*columns)])
    return map_tensors(lambda _: next(batched), states[0])


def batch(states: Sequence[State]) -> State | Rows:
    """Put streams, a state of batch 1 for each, in one state, wherever they stand: `Rows` where the layouts differ.

    Raises:
        ValueError: there is none.
    """
    is_uniform = len({layout(state) for state in states}) <= 1
    return concatenate(states) if is_uniform else Rows(tuple(states))


def _has_rows(state: Any) -> bool:
    is_nested = isinstance(state, (tuple, list))
    return isinstance(state, Rows) or (is_nested and any(_has_rows(item) for item in state))


def split(state: State) -> list[State]:
    """Take a batched state apart into one of batch 1 for every stream, each in memory of its own.

    Raises:
        ValueError: `state` has no tensor, so that it does not say how many streams it is of.
    """
    count = n_streams(state)
    if count is None:
        raise ValueError("state has no tensor; expected at least one, whose dimension 0 counts the streams")
    # Copies: a view of one row would keep the rows of all streams alive.
    return [map_tensors(Tensor.clone, select(state, slice(row, row + 1))) for row in range(count)]


def to(state: State, device: torch.device | str) -> State:
    """Move every tensor of `state` to `device`."""
    return map_tensors(lambda tensor: tensor.to(device), state)


def n_bytes(state: Any) -> int:
    """Count the bytes that the tensors of `state` hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(state))
