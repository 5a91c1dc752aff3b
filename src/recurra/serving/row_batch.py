"""Rows of streams that write side by side: one state for all of them, which rows join and leave between steps."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from recurra.decoding.linear import MOST_VECTORS
from recurra.serving.served_model import ServedModel
from recurra.serving.turns import Row
from recurra.state import Ragged, batch, concatenate_alike, map_tensors, select, split

MOST_ROWS = MOST_VECTORS
"""Rows of a batch: as many as one pass over the weights serves."""


class RowBatch:
    """Rows of one model and their batched state; only rows that come or go cost a copy of it.

    Args:
        model: the model of all rows.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.rows: list[Row] = []
        self._state: Any = None
        self._before: Any = None  # the state before the last step, until rows leave after it

    def join(self, rows: Sequence[Row], states: Sequence[Any]) -> None:
        """Add rows whose states are given."""
        if not rows:
            return
        groups = concatenate_alike(
            [*([] if self._state is None or _is_ragged(self._state) else [self._state]), *states]
        )
        if len(groups) == 1 and not _is_ragged(self._state):
            self._state = groups[0][1]
        else:
            self._state = batch([*([] if self._state is None else split(self._state)), *states])
        self.rows.extend(rows)

    def step(self) -> Tensor:
        """Let every row read its last token; give the logits after it, (rows, outputs)."""
        tokens = torch.tensor([[row.recent[-1]] for row in self.rows])
        logits, after = self.model.runner(tokens, self._state)
        self._state, self._before = after, self._state
        return logits[:, 0]

    def state_of(self, row: int) -> Any:
        """Give a row's state, in its own memory."""
        return _row(self._state, row)

    def leave(self, leaving: Sequence[int], *, undone: Collection[int] = ()) -> list[Any]:
        """Remove rows by their places; give their states, of `undone` those before the last step."""
        before, self._before = self._before, None
        if not leaving:
            return []
        before = self._state if before is None else before
        states = [_row(before if row in undone else self._state, row) for row in leaving]
        gone = set(leaving)
        staying = [row for row in range(len(self.rows)) if row not in gone]
        self._state = select(self._state, torch.tensor(staying)) if staying else None
        self.rows = [self.rows[row] for row in staying]
        return states

    def take_over(self, other: "RowBatch") -> None:
        """Add all rows of another batch."""
        self.join(other.rows, [] if other._state is None else split(other._state))
        other.rows, other._state = [], None


def _row(state: Any, row: int) -> Any:
    return map_tensors(Tensor.clone, select(state, slice(row, row + 1)))


def _is_ragged(state: Any) -> bool:
    return isinstance(state, Ragged)
