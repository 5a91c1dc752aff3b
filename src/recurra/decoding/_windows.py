"""Keys and values of attention layers in a compiled step; each row may hold a different number of steps.

A state never changes; a step returns a longer one without copying. Keys and values are in buffers with room for later
steps, and a state is a view that ends at its own last step. Only the longest view of a buffer can be continued in
place, and only once; any other state is first copied into a new buffer with room to grow.
"""

import threading
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from recurra.state import Ragged

Rows: TypeAlias = Tensor | Ragged
"""Keys or values of all rows: (B, p, G, bytes or numbers), or one such tensor for each row."""

_growing = threading.Lock()
_LEAST_ROOM = 64
"""Minimum room for further steps in a new buffer; longer states get a quarter of their length."""


class Attention(NamedTuple):
    """How channels of keys are rotated, the first ones; what products are scaled by; most steps of the next state."""

    n_rotated: int
    rotation_base: float
    scale: float
    most_steps: int | None


class Window(NamedTuple):
    """Indices of a layer's keys and values in a program's inputs and outputs."""

    keys: int
    values: int
    next_keys: int
    next_values: int
    most: int | None
    """Maximum number of steps in the next state; None if unlimited."""
    is_joint: bool = False
    """Whether a step has one vector: that of `values`, (B, p, channels), and then that of `keys`."""

    def advance(self, inputs: list[Any], outputs: list[Any]) -> "array[int]":
        """Put the next state into `outputs`; the kernel writes its last step.

        Returns, for the kernel, each row's addresses of keys and values, and their number of steps, with the new one.
        """
        pairs = list(zip(parts_of(inputs[self.keys]), parts_of(inputs[self.values])))
        rows, following = array("q"), []
        for pair in pairs:
            longer = [_one_longer(_joined(*pair))] * 2 if self.is_joint else [_one_longer(part) for part in pair]
            n = longer[0].shape[1]
            apart = [part.stride(0) * part.element_size() for part in longer]
            for row in range(len(longer[0])):
                rows.extend([*(part.data_ptr() + row * by for part, by in zip(longer, apart)), n])
            if self.is_joint:
                n_first = pair[1].shape[2]
                longer = [longer[0][:, :, 0, n_first:], longer[0][:, :, 0, :n_first]]
            gone = 0 if self.most is None else max(0, n - self.most)
            following.append([part[:, gone:] for part in longer] if gone else longer)
        for place, parts in zip((self.next_keys, self.next_values), zip(*following)):
            outputs[place] = parts[0] if isinstance(inputs[self.keys], Tensor) else Ragged(tuple(parts))
        return rows

    def fits(self, inputs: Sequence[Any], like: Sequence[Tensor], most_steps: int) -> bool:
        """Return whether keys and values have the dtype, heads and number of rows of the recorded step."""
        keys, values = (parts_of(inputs[place]) for place in (self.keys, self.values))
        models, n_rows = (like[self.keys], like[self.values]), 0
        is_ragged = isinstance(inputs[self.keys], Ragged)
        most = most_steps - 1 if self.most is None else min(self.most, most_steps - 1)
        for pair in zip(keys, values):
            if is_ragged and len(pair[0]) != 1:
                return False
            for part, model in zip(pair, models):
                is_alike = type(part) is type(model) and part.dtype is model.dtype and part.is_cpu
                is_alike = is_alike and part.shape[:2] == pair[0].shape[:2] and part.shape[2:] == model.shape[2:]
                if not is_alike or part.shape[1] > most or (part.numel() and not part.data_ptr()):
                    return False
            n_rows += len(pair[0])
        return len(keys) == len(values) and n_rows == len(models[0])


def parts_of(rows: Rows) -> tuple[Tensor, ...]:
    """Return the separate tensors of ragged rows, or the one tensor of equal rows."""
    return rows.states if isinstance(rows, Ragged) else (rows,)


def filled_up(rows: Rows, count: int, is_window: bool) -> Rows:
    """Append rows until there are `count`: copies of the last row or, for a window, rows of no steps."""
    if not is_window and isinstance(rows, Tensor):
        return torch.cat((rows, rows[-1:].expand(count - len(rows), *rows.shape[1:])))
    parts = [row for part in parts_of(rows) for row in part.split(1)]
    return Ragged((*parts, *[parts[-1][:, :0]] * (count - len(parts))))


def first_rows(rows: Rows, count: int) -> Rows:
    """Return the first `count` rows."""
    return Ragged(rows.states[:count]) if isinstance(rows, Ragged) else rows[:count]


def _joined(last: Tensor, first: Tensor) -> Tensor:
    """Return two tensors (B, p, channels) as one (B, p, 1, channels of both), a copy unless a buffer holds it."""
    n_first, width = first.shape[2], first.shape[2] + last.shape[2]
    is_one = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    is_one = is_one and first.stride() == last.stride() and first.stride()[1:] == (width, 1)
    if is_one and first.numel() and last.data_ptr() == first.data_ptr() + n_first * first.element_size():
        return first.as_strided((*first.shape[:2], 1, width), (first.stride(0), width, width, 1))
    return torch.cat([first, last], -1)[:, :, None]


def _one_longer(part: Tensor) -> Tensor:
    """Return keys or values with one more step, whose contents are not yet written."""
    n_rows, n, n_heads, width = part.shape
    storage: Any = part.untyped_storage()
    with _growing:
        shape = getattr(storage, "recurra_shape", None)  # of the longest state in this buffer
        if shape is not None and shape[1] < (room := shape[4]):
            strides = room * n_heads * width, n_heads * width, width, 1
            is_last = part.storage_offset() == (shape[1] - n) * strides[1] and shape[::2] == (n_rows, n_heads, room)
            first = int(n_rows == 1)  # with one row, its stride does not matter
            if is_last and shape[3] == width and part.stride()[first:] == strides[first:]:
                storage.recurra_shape = (n_rows, shape[1] + 1, n_heads, width, room)
                return part.as_strided((n_rows, n + 1, n_heads, width), strides)
    room = n + 1 + max(_LEAST_ROOM, n // 4)
    memory = torch.empty((n_rows, room, n_heads, width), dtype=part.dtype, device="cpu")
    memory[:, :n] = part
    storage = memory.untyped_storage()
    storage.recurra_shape = (n_rows, n + 1, n_heads, width, room)
    return memory[:, : n + 1]
