"""Recurrent states: any nesting of NamedTuples, tuples and lists over tensors, numbers and None.

A state is passed in and returned, never stored on a module and never changed in place. These functions return a new
state of the same structure. Modules check the states that they receive (`recurra.mixers.base`). The caller decides
whether gradients cross a border: `detach` cuts them.

States are pytrees: `torch.utils._pytree` walks them, here and in torch itself.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

from recurra.checks import kind_of, sentence

State = TypeVar("State")


class Ragged(NamedTuple):
    """The state of a batch with sequences at different positions, which have tensors of different shapes.

    It replaces a module's own state if the layout depends on the position, such as how full a window is or the position
    in a segment. The module continues from it as from any other state. Compiled steps return it for single tensors, the
    keys and values of an attention layer.
    """

    states: tuple[Any, ...]
    """One state of batch 1 for every sequence."""


def require_streams(require_state: Callable[[Any, int], None], state: Any, batch: int) -> None:
    """Call `require_state(state, batch)`, or once for each stream of a `Ragged`, which must have `batch` of them."""
    if not isinstance(state, Ragged):
        require_state(state, batch)
        return
    if len(state.states) != batch:
        raise ValueError(sentence("state", f"a Ragged of {len(state.states)} streams", f"one of {batch}"))
    for single in state.states:
        require_state(single, 1)


def map_tensors(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply `function` to every tensor of `state` and return the same structure."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else _plain(leaf), state)


def _plain(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (int, float, bool)):
        return leaf
    raise TypeError(
        f"state holds a {type(leaf).__name__}; expected tensors, numbers and None in (named) tuples and lists"
    )


def tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors of `state`, depth first, in a fixed order."""
    return (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def detach(state: State) -> State:
    """Cut the gradients that flow through `state`: the border of truncated back-propagation through time."""
    return map_tensors(Tensor.detach, state)


def select(state: State, index: Tensor | slice) -> State:
    """Take streams out of a batched state: `index` selects along dimension 0 of every tensor.

    Args:
        state: a state with the batch in dimension 0 of every tensor.
        index: a slice, or a tensor of indices or booleans over the batch.
    """
    if not isinstance(index, slice) and (not isinstance(index, Tensor) or index.dim() == 0):
        raise TypeError(
            sentence("index", repr(index), "a slice or a tensor of indices", "slice(n, n + 1) takes stream n")
        )

    def take(part: Any) -> Any:
        if isinstance(part, Ragged):
            places = torch.arange(len(part.states), device="cpu")
            numbers = places[index.cpu() if isinstance(index, Tensor) else index].tolist()
            rows = tuple(part.states[number] for number in numbers)
            if len(rows) > 1 and isinstance(rows[0], Tensor):  # decoding continues each in its own memory
                return Ragged(rows)
            return batch(rows) if rows else select(part.states[0], slice(0))
        return part[index] if isinstance(part, Tensor) else _plain(part)

    return tree_map(take, state, is_leaf=_is_ragged)


def n_streams(state: Any) -> int | None:
    """Count the streams of a batched state; None if it has no tensor to say so."""
    for part in tree_leaves(state, is_leaf=_is_ragged):
        if isinstance(part, Ragged):
            return len(part.states)
        if isinstance(part, Tensor):
            return part.shape[0] if part.dim() else None
    return None


def layout(state: Any) -> Hashable:
    """Describe `state` without its batch: structure, numbers, and the dtype, device and shape of its tensors.

    States can be concatenated if, and only if, their layouts are equal.
    """
    leaves, structure = tree_flatten(state)
    return structure, _forms(leaves)


def _forms(leaves: Sequence[Any]) -> Hashable:
    return tuple(
        (leaf.dtype, leaf.device, leaf.shape[1:]) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves
    )


def concatenate(states: Sequence[State]) -> State:
    """Concatenate streams into one batched state, along dimension 0 of every tensor; `split` reverses it.

    Args:
        states: one or more states of the same layout. States of a segment-level model have the same layout if their
            streams are at the same position in their segments.
    """
    if not states:
        raise ValueError("states is empty; expected at least one state to concatenate")
    (_, joined), *others = concatenate_alike(states)
    if others:
        hint = "concatenate_alike makes one batch for each layout"
        raise ValueError(sentence(f"states[{others[0][0][0]}]", "of another layout", "that of states[0]", hint))
    return joined


def concatenate_alike(states: Sequence[State]) -> list[tuple[list[int], State]]:
    """Concatenate streams into as few batched states as possible: one for each layout.

    Returns:
        For each layout, the indices in `states` of its streams, in ascending order, and their batched state.
    """
    groups: dict[tuple[TreeSpec, Hashable], tuple[list[int], list[Sequence[Any]]]] = {}
    for number, state in enumerate(states):
        leaves, structure = tree_flatten(state, is_leaf=_is_ragged)
        if any(map(_is_ragged, leaves)):
            raise ValueError(
                "states holds a Ragged state; expected states of one layout: split them first, or use "
                "recurra.state.batch"
            )
        numbers, rows = groups.setdefault((structure, _forms(leaves)), ([], []))
        numbers.append(number)
        rows.append(leaves)

    def joined(parts: tuple[Any, ...]) -> Any:
        return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]

    return [
        (numbers, tree_unflatten(list(map(joined, zip(*rows))), structure))
        for (structure, _), (numbers, rows) in groups.items()
    ]


def batch(states: Sequence[State]) -> State | Ragged:
    """Combine streams, each a state of batch 1, into one state at any positions: `Ragged` if their layouts differ."""
    is_uniform = len({layout(state) for state in states}) <= 1
    return concatenate(states) if is_uniform else Ragged(tuple(states))


def join(states: Sequence[State]) -> State | Ragged:
    """Combine batched states, each of any number of streams, as `batch` does states of one.

    Where one of them has a `Ragged` of tensors, it takes the tensors of the others.
    """
    flat, structures = zip(*(tree_flatten(state, is_leaf=_is_ragged) for state in states))
    columns = list(zip(*flat))
    if all(structure == structures[0] for structure in structures) and all(map(_can_join, columns)):
        return tree_unflatten([_joined(column) for column in columns], structures[0])
    return batch([single for state in states for single in split(state)])


def _can_join(parts: Sequence[Any]) -> bool:
    if any(map(_is_ragged, parts)):
        return all(isinstance(part.states[0] if _is_ragged(part) else part, Tensor) for part in parts)
    return all(_forms([part]) == _forms(parts[:1]) for part in parts)


def _joined(parts: Sequence[Any]) -> Any:
    if any(map(_is_ragged, parts)):
        return Ragged(tuple(row for part in parts for row in (part.states if _is_ragged(part) else part.split(1))))
    return torch.cat(tuple(parts)) if isinstance(parts[0], Tensor) else parts[0]


def _is_ragged(part: Any) -> bool:
    return isinstance(part, Ragged)


def split(state: State) -> list[State]:
    """Split a batched state into one state of batch 1 per stream, each in its own memory."""
    count = n_streams(state)
    if count is None:
        raise ValueError("state has no tensor; expected at least one, whose dimension 0 counts the streams")
    leaves, structure = tree_flatten(state, is_leaf=_is_ragged)

    def apart(leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, Tensor):  # copies: a view of one stream would keep those of all streams alive
            return [row.clone() for row in leaf.split(1)[:count]]
        return leaf.states if _is_ragged(leaf) else [_plain(leaf)] * count

    return [tree_unflatten(row, structure) for row in zip(*map(apart, leaves))]


def n_bytes(state: Any) -> int:
    """Count the bytes of the tensors in `state`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(state))


def last_step(h: Tensor, h0: Tensor) -> Tensor:
    """Return the state after the last of the steps h (B, L, ...), or h0 if there are no steps.

    It owns its memory: a carried view would keep the states of all steps alive.
    """
    return h[:, -1].clone() if h.shape[1] else h0


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def state_to_tensors(state: Any) -> dict[str, Tensor]:
    """Turn a state into tensors that any file can hold, by their places in it, such as `layers.0.conv`.

    Complex tensors become pairs of real ones, and numbers tensors of one width. The start of a stream, None, has none.

    Raises:
        ValueError: sequences of the batch are at different positions.
    """
    return {place: _storable(leaf) for place, leaf in _places(state) if leaf is not None}


def _places(state: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a state and their places, in the order of pytrees."""
    if isinstance(state, Ragged):
        raise ValueError(sentence("state", "one of different positions", "one of a single sequence", "see split"))
    if not isinstance(state, (tuple, list)):
        yield before[:-1], state
        return
    for name, item in zip(getattr(state, "_fields", range(len(state))), state):
        yield from _places(item, f"{before}{name}.")


def _storable(leaf: Any) -> Tensor:
    if not isinstance(leaf, Tensor):
        return torch.tensor(leaf, dtype=_NUMBERS[type(leaf)], device="cpu")
    leaf = leaf.detach()
    return torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf  # safetensors has no complex128


def state_from_tensors(saved: Mapping[str, Tensor], model: nn.Module) -> Any:
    """Rebuild a state of `model` from the tensors of `state_to_tensors`, on the model's device.

    `model.initial_state(batch)` shows the structure of its states, and `model.require_state(state, batch)` refuses any
    state that it could not have returned.
    """
    if not saved:
        return None
    batch = next((tensor.shape[0] for tensor in saved.values() if tensor.dim()), 1)
    # Of one stream, however many are saved: a file must not say how much is allocated.
    like = model.initial_state(1)  # type: ignore[operator]
    places = dict(_places(like))
    for place in saved.keys() - places:
        _restored(place, saved[place], None)
    leaves = [_restored(place, saved.get(place), leaf) for place, leaf in places.items()]
    state = tree_unflatten(leaves, tree_structure(like))
    model.require_state(state, batch)  # type: ignore[operator]
    return state


def _restored(place: str, saved: Tensor | None, like: Any) -> Any:
    if saved is None and like is None:
        return None
    if saved is not None and isinstance(like, Tensor):
        is_pairs = like.is_complex() and saved.dtype == like.real.dtype and saved.shape[-1:] == (2,)
        return (torch.view_as_complex(saved.contiguous()) if is_pairs else saved).to(like.device)
    if saved is not None and not saved.dim() and saved.dtype == _NUMBERS.get(type(like)):
        return saved.item()
    got = f"{kind_of(saved)} in the saved state"
    raise ValueError(sentence(f"state.{place}", got, f"{kind_of(like)}, as in the model"))
