"""Packed sequences: sequences of different lengths, end to end, in tensors (1, T, ...).

Their borders are `cu_seqlens`, the cumulative lengths: N + 1 integers from 0 to T. Sequence i has the steps
cu_seqlens[i] up to, but not including, cu_seqlens[i + 1]. A sequence may be empty.

There are two ways through them. `start_anew` makes one scan of all sequences: the transition into a first step is 0.
`PackedSequences` turns them into padded batches, sequences of similar lengths together, for everything else.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from recurra.checks import require_tensor, sentence
from recurra.state import Ragged, State, concatenate, select, tensors


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, n_steps: int) -> None:
    """Refuse anything but the borders of packed tensors (1, n_steps, ...).

    The values are read on the CPU only, and not while a graph is traced: elsewhere that would wait for the device.

    Raises:
        TypeError: it is not a tensor of int32 or int64.
        ValueError: it is not one-dimensional, does not ascend from 0 to n_steps, or the batch is not 1.
    """
    require_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(sentence("cu_seqlens", f"of type {cu_seqlens.dtype}", "int32 or int64"))
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(sentence("cu_seqlens", f"of shape {tuple(cu_seqlens.shape)}", "(N + 1,) for N >= 1 sequences"))
    if batch != 1:
        raise ValueError(
            f"cu_seqlens is given for a batch of {batch}; expected packed tensors of batch 1: put the sequences end to "
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
    """Bring borders to the CPU, where they can be read (and checked) without waiting for a device again."""
    return cu_seqlens.cpu() if isinstance(cu_seqlens, Tensor) else cu_seqlens


def start_anew(
    a: Tensor,
    b: Shaped[Tensor, "1 T *channels"],
    h0: Shaped[Tensor, "N *channels"] | None,
    cu_seqlens: Int[Tensor, " borders"],
    reverse: bool,
) -> tuple[Tensor, Shaped[Tensor, "1 T *channels"]]:
    """Return the a and b of one scan from zero that equals the scans of all sequences.

    The transition into the first step of a sequence (the last if `reverse`) is 0, and its h0 enters through b, as
    b + a h0. Masked transitions have no gradient, so none crosses a border.

    Args:
        a: transitions whose shape broadcasts to b's, of b's dtype.
        b: inputs of the sequences, end to end.
        h0: the state before each sequence; zeros if None.
        cu_seqlens: the borders.
        reverse: whether the scan walks from the last step to the first.
    """
    if not b.shape[1]:
        return a, b
    borders = cu_seqlens.to(b.device, torch.int64)
    is_empty = borders[1:] == borders[:-1]
    # It does not matter where an empty sequence begins, as long as there is such a step.
    first = (borders[1:] - 1).clamp(min=0) if reverse else borders[:-1].clamp(max=b.shape[1] - 1)
    starts = torch.zeros(b.shape[1], dtype=torch.int64, device=b.device).index_add(0, first, (~is_empty).long())
    if h0 is not None:
        entering = a.expand(b.shape)[0].index_select(0, first) * h0
        entering = entering.masked_fill(is_empty.view(-1, *[1] * (b.dim() - 2)), 0)
        b = b.index_add(1, first, entering[None])
    return a.masked_fill((starts > 0).view(-1, *[1] * (b.dim() - 2)), 0), b


def check_streams(state: State, n_sequences: int) -> None:
    """Refuse a state of another number of streams than `n_sequences`. Raises ValueError."""
    counts = {len(state.states)} if isinstance(state, Ragged) else {len(tensor) for tensor in tensors(state)}
    if not counts <= {n_sequences}:
        came = " and ".join(map(str, sorted(counts)))
        raise ValueError(f"state is of {came} streams; expected one for each of the {n_sequences} sequences")


class Group(NamedTuple):
    """Packed sequences of similar lengths as a padded batch: n of them, the longest of L steps."""

    sequences: Int[Tensor, " n"]
    """Their numbers."""
    is_step: Bool[Tensor, "n L"] | None
    """The mask: each sequence stands at the front. None if there is no padding."""


class PackedSequences:
    """The way from packed tensors (1, T, ...) to padded batches and back.

    The shortest sequence of a group is at least half as long as the longest: no more than 2 T places for T steps, and
    at most 2 + log2(T) groups. So nothing passes between sequences, not even NaN, and each is computed as it would be
    alone. The lengths are needed on the host: with `cu_seqlens` on the CPU there is no wait for a device.

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
        """Number of sequences."""
        self.groups: list[Group] = []
        self._shapes: list[tuple[int, int]] = []
        places, order, back, n_places = [], [], torch.zeros(x.shape[1], dtype=torch.int64, device="cpu"), 0
        for numbers in _of_similar_lengths(lengths.tolist()):
            sequences = torch.tensor(numbers, device="cpu")
            longest = int(lengths[sequences[0]])
            every = torch.arange(longest, device="cpu")
            is_step = every < lengths[sequences, None]
            steps = starts[sequences, None] + every
            places.append(steps.where(is_step, 0).flatten())  # any step: what stands there is masked
            numbered = torch.arange(n_places, n_places + steps.numel(), device="cpu").view_as(steps)
            back[steps[is_step]] = numbered[is_step]
            n_places += steps.numel()
            self._shapes.append((len(numbers), longest))
            is_full = bool(is_step.all())
            self.groups.append(Group(sequences.to(x.device), None if is_full else is_step.to(x.device)))
            order.append(sequences)
        self._places, self._back = torch.cat(places).to(x.device), back.to(x.device)
        self._in_order = torch.cat(order).argsort().to(x.device)

    def padded(self, x: Shaped[Tensor, "1 T *rest"], padding: float | None = None) -> list[Shaped[Tensor, "_ _ *rest"]]:
        """Return the padded batch of every group, padded with `padding`, or with any step of x if that is None."""
        sizes = [n * length for n, length in self._shapes]
        batches = []
        for group, shape, flat in zip(self.groups, self._shapes, x[0].index_select(0, self._places).split(sizes)):
            padded = flat.view(*shape, *x.shape[2:])
            if padding is not None and group.is_step is not None:
                padded = padded.masked_fill(~group.is_step.view(*shape, *[1] * (x.dim() - 2)), padding)
            batches.append(padded)
        return batches

    def packed(self, batches: Sequence[Shaped[Tensor, "_ _ *rest"]]) -> Shaped[Tensor, "1 T *rest"]:
        """Put the steps of all groups end to end again."""
        steps = [padded.flatten(0, 1) for padded in batches]
        steps = [padded for padded in steps if padded.numel()] or steps  # what has no step has no type of its own
        return torch.cat(steps).index_select(0, self._back)[None]

    def states(self, state: State) -> list[State]:
        """Take the states of every group out of one of all sequences; None is the start of every stream.

        Raises:
            ValueError: it is of another number of streams.
        """
        check_streams(state, self.n_sequences)
        return [select(state, group.sequences) for group in self.groups]

    def in_order(self, states: Sequence[State]) -> State:
        """Put the groups' states together, in the order of the sequences."""
        return select(concatenate(states), self._in_order)


def _of_similar_lengths(lengths: list[int]) -> list[list[int]]:
    """The numbers of the sequences, longest first, in groups whose shortest is at least half as long as the longest."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if not groups or 2 * lengths[number] < lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(number)
    return groups
