"""Run any module under the contract over sequences of different lengths, padded or packed.

    y, state = run_lengths(run, x, state, mask=mask)               mask (B, L), True where a step counts
    y, state = run_lengths(run, x, state, cu_seqlens=cu_seqlens)   x (1, T, ...), N sequences, a state of batch N

There are two ways. A recurrence lets its state pass through padding (a = 1, b = 0): it takes a mask itself, and packed
sequences become padded batches. Everything else runs in pieces, which needs nothing but the contract, for a stream may
be cut anywhere: all sequences together up to the end of the shortest, then those that are left. There are as many calls
as different lengths, no step is wasted, and dropout draws again in each call. If the layout of a state depends
on the position, such sequences leave a `recurra.state.Ragged`, from which any later call continues: sequences at the
same place run together.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from recurra.lengths.packed import PackedSequences, check_streams, on_host
from recurra.lengths.padded import check_lengths
from recurra.state import Ragged, batch, concatenate, layout, select, split

Run = Callable[..., tuple[Tensor, Any]]
"""`(x, state) -> (y, state)`; one that lets its state pass through padding is `(x, state, mask) -> (y, state)`."""


def run_lengths(
    run: Run,
    x: Shaped[Tensor, "B L *rest"],
    state: Any,
    *,
    mask: Bool[Tensor, "B L"] | None = None,
    cu_seqlens: Int[Tensor, " borders"] | None = None,
    skips_padding: bool = False,
) -> tuple[Tensor, Any]:
    """Run a module over sequences of different lengths.

    Args:
        run: the module; cutting a stream anywhere must not change its results.
        x: padded sequences (B, L, ...), or packed ones (1, T, ...).
        state: that of all sequences, which may be `Ragged`; None is the start of every stream.
        mask: True where a step counts.
        cu_seqlens: the borders of packed sequences.
        skips_padding: whether `run` takes a mask and lets its state pass through padding.

    Returns:
        y, zeros at padding, and the state: `Ragged` if the sequences' states differ in layout.

    Raises:
        TypeError, ValueError: as `check_lengths`; the state has another number of streams.
    """
    if cu_seqlens is not None:
        cu_seqlens = on_host(cu_seqlens)
    check_lengths(x, mask, cu_seqlens)
    if not skips_padding or isinstance(state, Ragged):
        return _in_pieces(run, x, state, mask, cu_seqlens)
    if cu_seqlens is not None:
        return _as_padded(run, x, state, cu_seqlens)
    return run(x, state, mask)


def _as_padded(run: Run, x: Tensor, state: Any, cu_seqlens: Tensor) -> tuple[Tensor, Any]:
    """Packed sequences as padded batches, those of similar lengths together."""
    packed = PackedSequences(cu_seqlens, x)
    outputs, states = [], []
    for group, padded, entering in zip(packed.groups, packed.padded(x), packed.states(state)):
        y, last = run(padded, entering, group.is_step)
        outputs.append(y)
        states.append(last)
    return packed.packed(outputs), packed.in_order(states)


def _in_pieces(run: Run, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Any]:
    """Pieces within which all sequences have one length and stand at one place."""
    steps = _counted_steps(x, mask, cu_seqlens)
    check_streams(state, len(steps))
    if not steps:
        return run(x, state)
    groups = [_cut(numbers, steps) for numbers in _at_one_place(state, len(steps))]
    order = torch.cat(
        [steps[number][piece.begin : piece.end] for pieces in groups for piece in pieces for number in piece.sequences]
    )
    sizes = [len(piece.sequences) * (piece.end - piece.begin) for pieces in groups for piece in pieces]
    gathered = iter(x.flatten(0, 1).index_select(0, order).split(sizes))
    outputs, finished = [], []
    for pieces in groups:
        current = _entering(state, pieces[0].sequences)
        for piece, following in itertools.zip_longest(pieces, pieces[1:]):
            shape = len(piece.sequences), piece.end - piece.begin, *x.shape[2:]
            y, current = run(next(gathered).reshape(shape), current)
            outputs.append(y.flatten(0, 1))
            n_left = len(following.sequences) if following else 0
            finished.append((piece.sequences[n_left:], select(current, slice(n_left, None))))
            current = select(current, slice(n_left))
    flat = torch.cat([y for y in outputs if y.numel()] or outputs)  # what has no step has no type of its own
    y = flat.new_zeros(x.shape[0] * x.shape[1], *flat.shape[1:]).index_copy(0, order, flat)
    return y.unflatten(0, x.shape[:2]), _in_order(finished)


class _Piece(NamedTuple):
    """Steps begin up to end of sequences that are at least as long; the longest comes first."""

    sequences: list[int]
    begin: int
    end: int


def _counted_steps(x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """For every sequence the numbers of its counted steps, in x with batch and time as one dimension."""
    n_sequences, n_steps = x.shape[:2]
    steps = torch.arange(n_sequences * n_steps, device=x.device)
    if cu_seqlens is not None:
        return steps.split(cu_seqlens.diff().tolist())
    if mask is None:
        return steps.split([n_steps] * n_sequences)
    return steps[mask.flatten()].split(mask.sum(1).tolist())


def _at_one_place(state: Any, n_sequences: int) -> list[list[int]]:
    """The numbers of the sequences, those that can enter a call together in one list."""
    if not isinstance(state, Ragged):
        return [list(range(n_sequences))]
    groups: dict[Hashable, list[int]] = {}
    for number, single in enumerate(state.states):
        groups.setdefault(layout(single), []).append(number)
    return list(groups.values())


def _cut(numbers: list[int], steps: Sequence[Tensor]) -> list[_Piece]:
    """Cut sequences where one of them ends. If the shortest has no step, the first piece has none."""
    numbers = sorted(numbers, key=lambda number: -len(steps[number]))
    ends = sorted({len(steps[number]) for number in numbers})
    return [
        _Piece([number for number in numbers if len(steps[number]) >= end], begin, end)
        for begin, end in zip([0, *ends], ends)
    ]


def _entering(state: Any, numbers: list[int]) -> Any:
    if isinstance(state, Ragged):
        return concatenate([state.states[number] for number in numbers])
    return select(state, torch.tensor(numbers, device="cpu"))


def _in_order(finished: list[tuple[list[int], Any]]) -> Any:
    """Put the states of groups of sequences together, in the order of the sequences."""
    order = torch.tensor([number for numbers, _ in finished for number in numbers], device="cpu").argsort()
    if len({layout(state) for _, state in finished}) == 1:
        return select(concatenate([state for _, state in finished]), order)
    singles = [single for _, state in finished for single in split(state)]
    return batch([singles[place] for place in order.tolist()])
