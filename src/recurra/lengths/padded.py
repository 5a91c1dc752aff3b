"""Rows of different lengths under the one contract: padded rows with a mask, or sequences packed end to end.

    y, state = module(x, state, mask=mask)               mask (B, L), boolean, True where a step counts
    y, state = module(x, state, cu_seqlens=cu_seqlens)   x (1, T, ...), N sequences, state of batch N

Padding may stand anywhere in a row. A row comes out as if its steps that count had been run alone: outputs, last state
and gradients; positions and segments count these steps only. Outputs of the others are zeros, and what stands at their
places in x, NaN too, is not read. A row without any step keeps its state. `recurra.lengths.packed` says what
`cu_seqlens` is: each sequence comes out as if run alone, and the state holds the sequences' in their order.

A module keeps its part of this in one of two ways. A recurrence lets its state pass through padded steps (a = 1,
b = 0): it takes a mask itself and leaves packed sequences to `in_rows`. Everything else is run by `in_pieces`, which
needs only the contract, for a stream may be cut anywhere: all rows together as far as the shortest reaches, then those
that are left. There are as many calls as different lengths, no step is computed in vain, and dropout draws anew in
each. Where the layout of a state depends on the position, such rows leave `recurra.state.Rows`, from which any later
call goes on: those at the same place together.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from recurra.lengths.packed import PackedRows, check_cu_seqlens, check_streams, on_host
from recurra.state import Rows, batch, concatenate, layout, select, split

Run = Callable[..., tuple[Tensor, Any]]
"""`(x, state) -> (y, state)`, for some also with the keyword `mask`."""


def check_lengths(x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Refuse a mask or borders that do not fit x, (B, L, ...).

    Raises:
        TypeError: the mask is no boolean tensor, or as `check_cu_seqlens`.
        ValueError: the mask is not of x's shape (B, L), both are given, or as `check_cu_seqlens`.
    """
    if mask is not None and cu_seqlens is not None:
        raise ValueError("mask and cu_seqlens are both given; packed sequences have no padding: leave one away")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *x.shape[:2])
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = f"of type {mask.dtype}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise TypeError(f"mask is {kind}; expected booleans, True where a step counts: mask.bool(), say")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask is of shape {tuple(mask.shape)}; expected (B, L) = {tuple(x.shape[:2])} as the input's")


def given_lengths(mask: Tensor | None, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    """Give as keywords what is not None: a module that knows neither need not take them where there is none."""
    named = {"mask": mask, "cu_seqlens": cu_seqlens}
    return {name: value for name, value in named.items() if value is not None}


def blank(x: Shaped[Tensor, "B L *rest"], mask: Bool[Tensor, "B L"] | None) -> Shaped[Tensor, "B L *rest"]:
    """Put zeros where a step does not count, without a gradient: nothing of what stands there is read, be it NaN."""
    return x if mask is None else x.masked_fill(~_along(mask, x), 0)


def keep(a: Shaped[Tensor, "B L *rest"], mask: Bool[Tensor, "B L"] | None) -> Shaped[Tensor, "B L *rest"]:
    """Put transitions of 1 where a step does not count: the state passes through."""
    return a if mask is None else a.masked_fill(~_along(mask, a), 1)


def _along(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))


def in_rows(
    run: Run,
    x: Shaped[Tensor, "B T *rest"],
    state: Any,
    *,
    cu_seqlens: Int[Tensor, " borders"],
    mask: Bool[Tensor, "B T"] | None = None,
) -> tuple[Tensor, Any]:
    """Run a module that takes a mask over packed sequences: as padded rows, those of similar lengths together.

    Args:
        run: the module, `(x, state, *, mask) -> (y, state)`.
        x: the sequences, (1, T, ...).
        state: one of batch N; None is the start of all.
        cu_seqlens: the borders.
        mask: must be None: both are refused.

    Raises:
        TypeError, ValueError: as `check_lengths`; the state is of another number of streams.
    """
    check_lengths(x, mask, cu_seqlens)
    packed = PackedRows(cu_seqlens, x)
    outputs, states = [], []
    for group, rows, entering in zip(packed.groups, packed.rows(x), packed.states(state)):
        y, last = run(rows, entering, **given_lengths(group.is_step, None))
        outputs.append(y)
        states.append(last)
    return packed.packed(outputs), packed.in_order(states)


def in_pieces(
    run: Run,
    x: Shaped[Tensor, "B L *rest"],
    state: Any,
    *,
    mask: Bool[Tensor, "B L"] | None = None,
    cu_seqlens: Int[Tensor, " borders"] | None = None,
) -> tuple[Tensor, Any]:
    """Run any module over rows of different lengths, in pieces over which its rows are of one length and at one place.

    Args:
        run: the module, `(x, state) -> (y, state)`; cut anywhere a stream must give the same.
        x: padded rows (B, L, ...), or packed sequences (1, T, ...).
        state: that of all rows or sequences, `Rows` too; None is the start of all.
        mask: True where a step counts.
        cu_seqlens: the borders of the sequences.

    Returns:
        y, with zeros where no step counts, and the state: `Rows` where the rows' differ in layout.

    Raises:
        TypeError, ValueError: as `check_lengths`; the state is of another number of streams.
    """
    if cu_seqlens is not None:
        cu_seqlens = on_host(cu_seqlens)
    check_lengths(x, mask, cu_seqlens)
    steps = _steps_of_rows(x, mask, cu_seqlens)
    check_streams(state, len(steps))
    if not steps:
        return run(x, state)
    groups = [_cut(rows, steps) for rows in _at_one_place(state, len(steps))]
    order = torch.cat(
        [steps[row][piece.begin : piece.end] for pieces in groups for piece in pieces for row in piece.rows]
    )
    sizes = [len(piece.rows) * (piece.end - piece.begin) for pieces in groups for piece in pieces]
    gathered = iter(x.flatten(0, 1).index_select(0, order).split(sizes))
    outputs, finished = [], []
    for pieces in groups:
        current = _entering(state, pieces[0].rows)
        for piece, following in itertools.zip_longest(pieces, pieces[1:]):
            shape = len(piece.rows), piece.end - piece.begin, *x.shape[2:]
            y, current = run(next(gathered).reshape(shape), current)
            outputs.append(y.flatten(0, 1))
            n_left = len(following.rows) if following else 0
            finished.append((piece.rows[n_left:], select(current, slice(n_left, None))))
            current = select(current, slice(n_left))
    flat = torch.cat(outputs)
    y = flat.new_zeros(x.shape[0] * x.shape[1], *flat.shape[1:]).index_copy(0, order, flat)
    return y.unflatten(0, x.shape[:2]), _in_order(finished)


class _Piece(NamedTuple):
    """Steps begin up to end of rows that are at least as long; rows come longest first."""

    rows: list[int]
    begin: int
    end: int


def _steps_of_rows(x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """For every row the numbers of its steps that count, in x with batch and time as one dimension."""
    n_rows, n_steps = x.shape[:2]
    steps = torch.arange(n_rows * n_steps, device=x.device)
    if cu_seqlens is not None:
        return steps.split(cu_seqlens.diff().tolist())
    if mask is None:
        return steps.split([n_steps] * n_rows)
    return steps[mask.flatten()].split(mask.sum(1).tolist())


def _at_one_place(state: Any, n_rows: int) -> list[list[int]]:
    """The numbers of the rows, those that can enter a call together in one list."""
    if not isinstance(state, Rows):
        return [list(range(n_rows))]
    groups: dict[Hashable, list[int]] = {}
    for row, of_row in enumerate(state.rows):
        groups.setdefault(layout(of_row), []).append(row)
    return list(groups.values())


def _cut(rows: list[int], steps: Sequence[Tensor]) -> list[_Piece]:
    """Cut rows where one of them ends. Where the shortest has no step, the first piece has none."""
    rows = sorted(rows, key=lambda row: -len(steps[row]))
    ends = sorted({len(steps[row]) for row in rows})
    return [_Piece([row for row in rows if len(steps[row]) >= end], begin, end) for begin, end in zip([0, *ends], ends)]


def _entering(state: Any, rows: list[int]) -> Any:
    if isinstance(state, Rows):
        return concatenate([state.rows[row] for row in rows])
    return select(state, torch.tensor(rows))


def _in_order(finished: list[tuple[list[int], Any]]) -> Any:
    """Put the states of some rows each together in the order of the rows."""
    order = torch.tensor([row for rows, _ in finished for row in rows]).argsort()
    if len({layout(state) for _, state in finished}) == 1:
        return select(concatenate([state for _, state in finished]), order)
    states = [of_row for _, state in finished for of_row in split(state)]
    return batch([states[place] for place in order.tolist()])
