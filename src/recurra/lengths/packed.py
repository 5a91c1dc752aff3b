"""Sequences of different lengths, packed end to end: a scan that starts anew at each, and the way into padded rows.

The borders are `cu_seqlens`, the cumulated lengths: N + 1 integers from 0 to T, where sequence i is the steps
cu_seqlens[i] up to, not including, cu_seqlens[i + 1] of tensors (1, T, ...). A sequence may be empty.

Two ways lead through them. `start_anew` makes one scan of all: the transition into a first step is 0. `PackedRows` puts
the sequences side by side as rows, those of similar lengths together, for everything that is more than a scan.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from recurra.state import State, concatenate, n_streams, select


def check_cu_seqlens(cu_seqlens: Tensor, n_rows: int, n_steps: int) -> None:
    """Refuse what is no list of borders for tensors (n_rows, n_steps, ...).

    Its numbers are looked at on the CPU only, and not while a graph is being traced: elsewhere it would have to wait
    for the device.

    Raises:
        TypeError: it is no tensor of int32 or int64.
        ValueError: it is not one-dimensional, does not ascend from 0 to n_steps, or n_rows is not 1.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens is a {type(cu_seqlens).__name__}; expected a torch.Tensor")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens is of type {cu_seqlens.dtype}; expected int32 or int64")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens is of shape {tuple(cu_seqlens.shape)}; expected (N + 1,) for N sequences, at least one"
        )
    if n_rows != 1:
        raise ValueError(
            f"cu_seqlens goes with packed tensors of batch 1, and here are {n_rows} rows; put the sequences end to "
            "end, (1, T, ...)"
        )
    if torch.compiler.is_compiling() or not cu_seqlens.is_cpu:
        return
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != n_steps:
        raise ValueError(
            f"cu_seqlens goes from {borders[0]} to {borders[-1]}; expected 0 to {n_steps}, the steps of all sequences"
        )
    for number, (start, end) in enumerate(itertools.pairwise(borders)):
        if end < start:
            raise ValueError(f"cu_seqlens falls from {start} to {end} after sequence {number}; expected it to ascend")


def on_host(cu_seqlens: Tensor) -> Tensor:
    """Bring borders to the CPU, where their numbers can be read (and checked) without waiting for a device again."""
    return cu_seqlens.cpu() if isinstance(cu_seqlens, Tensor) else cu_seqlens


def start_anew(
    a: Tensor,
    b: Shaped[Tensor, "1 T *channels"],
    h0: Shaped[Tensor, "N *channels"] | None,
    cu_seqlens: Int[Tensor, " borders"],
    reverse: bool,
) -> tuple[Tensor, Shaped[Tensor, "1 T *channels"]]:
    """Give the a and b of one scan, from zero, that is the scans of all sequences.

    The transition into the first step of a sequence (the last when `reverse`) is 0, and its h0 enters through b:
    b + a h0. What is masked has no gradient, so that none crosses a border.

    Args:
        a: transitions of a shape that broadcasts to b's, and of its type.
        b: inputs of the sequences, end to end.
        h0: the state before each; zeros when None.
        cu_seqlens: the borders.
        reverse: whether the scan walks from the last step to the first.
    """
    if not b.shape[1]:
        return a, b
    borders = cu_seqlens.to(b.device, torch.int64)
    is_empty = borders[1:] == borders[:-1]
    # Where an empty sequence would begin does not matter, as long as it is a step at all.
    first = (borders[1:] - 1).clamp(min=0) if reverse else borders[:-1].clamp(max=b.shape[1] - 1)
    starts = torch.zeros(b.shape[1], dtype=torch.int64, device=b.device).index_add(0, first, (~is_empty).long())
    if h0 is not None:
        entering = a.expand(b.shape)[0].index_select(0, first) * h0
        entering = entering.masked_fill(is_empty.view(-1, *[1] * (b.dim() - 2)), 0)
        b = b.index_add(1, first, entering[None])
    return a.masked_fill((starts > 0).view(-1, *[1] * (b.dim() - 2)), 0), b


def check_streams(state: State, n_rows: int) -> None:
    """Refuse a state of another number of streams than `n_rows`. Raises ValueError."""
    count = n_streams(state)
    if count not in (None, n_rows):
        raise ValueError(f"state is of {count} streams; expected one for each of the {n_rows} sequences")


class Group(NamedTuple):
    """Packed sequences of similar lengths as rows: n of them, the longest of L steps."""

    sequences: Int[Tensor, " n"]
    """Their numbers."""
    is_step: Bool[Tensor, "n L"] | None
    """Where a row has a step: at its front, as many as it is long. None where the rows are full."""


class PackedRows:
    """The way from packed tensors (1, T, ...) to padded rows and back.

    Sequences go in groups whose shortest is at least half as long as the longest: no more than 2 T places for T steps,
    and at most 2 + log2(T) groups. Nothing passes between sequences then, be it NaN, and a sequence is computed as it
    would be alone. The lengths are needed on the host: with `cu_seqlens` on the CPU no device has to be waited for.

    Args:
        cu_seqlens: the borders.
        x: a packed tensor, (1, T, ...), for its sizes and its device.

    Raises:
        TypeError, ValueError: as `check_cu_seqlens`.
    """

    def __init__(self, cu_seqlens: Tensor, x: Shaped[Tensor, "B T *rest"]) -> None:
        borders = on_host(cu_seqlens)
        check_cu_seqlens(borders, *x.shape[:2])
        starts, lengths = borders[:-1].long(), borders.diff().long()
        self.n_sequences = len(lengths)
        """How many there are."""
        self.groups: list[Group] = []
        self._shapes: list[tuple[int, int]] = []
        places, order, back, n_places = [], [], torch.zeros(x.shape[1], dtype=torch.int64), 0
        for numbers in _of_similar_lengths(lengths.tolist()):
            sequences = torch.tensor(numbers)
            longest = int(lengths[sequences[0]])
            is_step = torch.arange(longest) < lengths[sequences, None]
            steps = starts[sequences, None] + torch.arange(longest)
            places.append(steps.where(is_step, 0).flatten())  # any step: what stands there is masked
            numbered = torch.arange(n_places, n_places + steps.numel()).view_as(steps)
            back[steps[is_step]] = numbered[is_step]
            n_places += steps.numel()
            self._shapes.append((len(numbers), longest))
            is_full = bool(is_step.all())
            self.groups.append(Group(sequences.to(x.device), None if is_full else is_step.to(x.device)))
            order.append(sequences)
        self._places, self._back = torch.cat(places).to(x.device), back.to(x.device)
        self._in_order = torch.cat(order).argsort().to(x.device)

    def rows(self, x: Shaped[Tensor, "1 T *rest"], padding: float | None = None) -> list[Shaped[Tensor, "_ _ *rest"]]:
        """Give the rows of every group; what is behind their ends is `padding`, or any step's where that is None."""
        sizes = [n * length for n, length in self._shapes]
        rows = []
        for group, shape, flat in zip(self.groups, self._shapes, x[0].index_select(0, self._places).split(sizes)):
            row = flat.view(*shape, *x.shape[2:])
            if padding is not None and group.is_step is not None:
                row = row.masked_fill(~group.is_step.view(*shape, *[1] * (x.dim() - 2)), padding)
            rows.append(row)
        return rows

    def packed(self, rows: Sequence[Shaped[Tensor, "_ _ *rest"]]) -> Shaped[Tensor, "1 T *rest"]:
        """Put the steps of every group's rows end to end again."""
        return torch.cat([row.flatten(0, 1) for row in rows]).index_select(0, self._back)[None]

    def states(self, state: State) -> list[State]:
        """Give the states of every group out of one of all sequences; None is the start of all.

        Raises:
            ValueError: it is of another number of streams.
        """
        check_streams(state, self.n_sequences)
        return [select(state, group.sequences) for group in self.groups]

    def in_order(self, states: Sequence[State]) -> State:
        """Put the groups' states together, in the order of the sequences."""
        return select(concatenate(states), self._in_order)


def _of_similar_lengths(lengths: list[int]) -> list[list[int]]:
    """The numbers of the sequences, longest first, in groups whose shortest is at least half the longest."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if not groups or 2 * lengths[number] < lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(number)
    return groups
