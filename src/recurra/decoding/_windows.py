"""The keys and values of attention layers in a compiled step: any number of steps, and another one in each row.

A state is a value, and a step returns a longer one. It does not copy what it holds: keys lie in memory with room for
later steps, and a state is a view of it up to its own last step. Only the longest such view may be continued in place,
once; anything else is copied first, with room to grow.
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
"""Steps for which new memory has room at least; it has room for a fourth more than it is made for."""


class Window(NamedTuple):
    """Where the keys and values of a layer are among a program's inputs and outputs."""

    keys: int
    values: int
    next_keys: int
    next_values: int
    most: int | None
    """Steps that the next state holds at most."""

    def advance(self, inputs: list[Any], outputs: list[Any]) -> "array[int]":
        """Put the next state into `outputs`, its last step unwritten.

        Returns where each row's keys and values begin and how many there are with the new step: what the kernel reads.
        """
        pairs = list(zip(parts_of(inputs[self.keys]), parts_of(inputs[self.values])))
        rows, following = array("q"), []
        for pair in pairs:
            longer = [_one_longer(part) for part in pair]
            n = longer[0].shape[1]
            apart = [part.stride(0) * part.element_size() for part in longer]
            for row in range(len(longer[0])):
                rows.extend([*(part.data_ptr() + row * by for part, by in zip(longer, apart)), n])
            gone = 0 if self.most is None else max(0, n - self.most)
            following.append([part[:, gone:] for part in longer] if gone else longer)
        for place, parts in zip((self.next_keys, self.next_values), zip(*following)):
            outputs[place] = parts[0] if isinstance(inputs[self.keys], Tensor) else Ragged(tuple(parts))
        return rows

    def fits(self, inputs: Sequence[Any], like: Sequence[Tensor], most_steps: int) -> bool:
        """Tell whether inputs are keys and values of as many rows and such heads as those of the recording."""
        keys, values = (parts_of(inputs[place]) for place in (self.keys, self.values))
        model, n_rows = like[self.keys], 0
        is_ragged = isinstance(inputs[self.keys], Ragged)
        most = most_steps - 1 if self.most is None else min(self.most, most_steps - 1)
        for pair in zip(keys, values):
            if is_ragged and len(pair[0]) != 1:
                return False
            for part in pair:
                is_alike = type(part) is type(model) and part.dtype is model.dtype and part.is_cpu
                is_alike = is_alike and part.shape[:2] == pair[0].shape[:2] and part.shape[2:] == model.shape[2:]
                if not is_alike or part.shape[1] > most or (part.numel() and not part.data_ptr()):
                    return False
            n_rows += len(pair[0])
        return len(keys) == len(values) and n_rows == len(model)


def parts_of(rows: Rows) -> tuple[Tensor, ...]:
    """Return the tensors."""
    return rows.states if isinstance(rows, Ragged) else (rows,)


def filled_up(rows: Rows, count: int, is_window: bool) -> Rows:
    """Append rows until there are `count`: copies of the last one, or keys and values of no steps."""
    if not is_window and isinstance(rows, Tensor):
        return torch.cat((rows, rows[-1:].expand(count - len(rows), *rows.shape[1:])))
    parts = [row for part in parts_of(rows) for row in part.split(1)]
    return Ragged((*parts, *[parts[-1][:, :0]] * (count - len(parts))))


def first_rows(rows: Rows, count: int) -> Rows:
    """Return the first rows."""
    return Ragged(rows.states[:count]) if isinstance(rows, Ragged) else rows[:count]


def _one_longer(part: Tensor) -> Tensor:
    """Return keys or values with one more step, whose numbers are to be written."""
    n_rows, n, n_heads, width = part.shape
    storage: Any = part.untyped_storage()
    with _growing:
        shape = getattr(storage, "recurra_shape", None)  # of the longest state in this memory
        if shape is not None and shape[1] < (room := shape[4]):
            strides = room * n_heads * width, n_heads * width, width, 1
            is_last = part.storage_offset() == (shape[1] - n) * strides[1] and shape[::2] == (n_rows, n_heads, room)
            first = int(n_rows == 1)  # any stride leads from the first row to no other
            if is_last and shape[3] == width and part.stride()[first:] == strides[first:]:
                storage.recurra_shape = (n_rows, shape[1] + 1, n_heads, width, room)
                return part.as_strided((n_rows, n + 1, n_heads, width), strides)
    room = n + 1 + max(_LEAST_ROOM, n // 4)
    memory = torch.empty((n_rows, room, n_heads, width), dtype=part.dtype, device="cpu")
    memory[:, :n] = part
    storage = memory.untyped_storage()
    storage.recurra_shape = (n_rows, n + 1, n_heads, width, room)
    return memory[:, : n + 1]
