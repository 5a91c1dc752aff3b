"""Sequences of different lengths in one call: padded with a mask, packed end to end, or starting inside a call."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from recurra.checks import kind_of, require_tensor, sentence
from recurra.state import Ragged, State, batch, concatenate, layout, select, split, tensors

# --- packed sequences: sequences of different lengths, end to end, in tensors (1, T, ...) ---
#
# Their borders are `cu_seqlens`, the cumulative lengths: N + 1 integers from 0 to T. Sequence i has the steps
# cu_seqlens[i] up to, but not including, cu_seqlens[i + 1]. A sequence may be empty.
#
# There are two ways through them. `start_anew` makes one scan of all sequences: the transition into a first step is
# 0. `PackedSequences` turns them into padded batches, sequences of similar lengths together, for everything else.


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, n_steps: int) -> None:
    """Refuse anything but the borders of packed tensors (1, n_steps, ...).

    The values are read on the CPU only, and not while a graph is traced: elsewhere that would wait for the device.
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


def _check_streams(state: State, n_sequences: int) -> None:
    """Refuse a state of another number of streams than `n_sequences`. Raises ValueError."""
    counts = {len(state.states)} if isinstance(state, Ragged) else {len(tensor) for tensor in tensors(state)}
    if not counts <= {n_sequences}:
        got = " and ".join(map(str, sorted(counts)))
        raise ValueError(f"state is of {got} streams; expected one for each of the {n_sequences} sequences")


class _Group(NamedTuple):
    """Packed sequences of similar lengths as a padded batch: n of them, the longest of L steps."""

    sequences: Int[Tensor, " n"]
    """Their numbers."""
    is_step: Bool[Tensor, "n L"] | None
    """The mask: each sequence stands at the front. None if there is no padding."""


class PackedSequences:
    """Converts packed tensors (1, T, ...) to padded batches and back.

    The shortest sequence of a group is at least half as long as the longest: at most 2 T positions for T steps, and
    at most 2 + log2(T) groups. Nothing passes between sequences, not even NaN, and each is computed as it would be
    alone. The lengths are needed on the host: with `cu_seqlens` on the CPU, there is no wait for a device.

    Args:
        cu_seqlens: the borders.
        x: a packed tensor, (1, T, ...), for its sizes and its device.
    """

    def __init__(self, cu_seqlens: Tensor, x: Shaped[Tensor, "B T *rest"]) -> None:
        borders = on_host(cu_seqlens)
        check_cu_seqlens(borders, *x.shape[:2])
        starts, lengths = borders[:-1].long(), borders.diff().long()
        self.n_sequences = len(lengths)
        """Number of sequences."""
        self.groups: list[_Group] = []
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
            self.groups.append(_Group(sequences.to(x.device), None if is_full else is_step.to(x.device)))
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
        """Take the states of every group out of one of all sequences; None is the start of every stream."""
        _check_streams(state, self.n_sequences)
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


# --- padded batches: a mask (B, L) is True where a step counts ---
#
# Padding may stand anywhere in a sequence. Each sequence gets exactly the outputs, last state and gradients that its
# counted steps would give alone; positions and segments count these steps only. Outputs at padding are zeros, and
# nothing that stands there in the input is read, not even NaN. A sequence without a counted step keeps its state.


def check_lengths(x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Refuse a mask or borders that do not fit x, (B, L, ...)."""
    if mask is not None and cu_seqlens is not None:
        raise ValueError("mask and cu_seqlens are both given; expected one: packed sequences have no padding")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *x.shape[:2])
    if mask is None:
        return
    _require_booleans("mask", mask, x, "a step counts")


def _require_booleans(name: str, marks: Tensor, x: Tensor, where: str) -> None:
    require_tensor(name, marks)
    if marks.dtype != torch.bool:
        raise TypeError(sentence(name, kind_of(marks), f"booleans, True where {where}", f"use {name}.bool()"))
    if marks.shape != x.shape[:2]:
        expected = f"(B, L) = {tuple(x.shape[:2])}, as the input"
        raise ValueError(sentence(name, f"of shape {tuple(marks.shape)}", expected))


def mask_fill(
    x: Shaped[Tensor, "B L *rest"], mask: Bool[Tensor, "B L"] | None, value: int
) -> Shaped[Tensor, "B L *rest"]:
    """Put `value` where a step does not count, without a gradient: nothing there is read, not even NaN.

    Inputs of 0 and transitions of 1 let a state pass through.
    """
    return x if mask is None else x.masked_fill(~mask.view(*mask.shape, *[1] * (x.dim() - 2)), value)


# --- rows that start anew inside of a call: `reset` (B, L) is True at the first step of each new sequence ---
#
# Outputs, last state and gradients are those of cutting every row there and starting the next piece from None. So a
# row can hold the end of one episode, whole ones, and the beginning of another: its first piece continues the state
# that comes in, and its last one leaves the state that comes out.
#
# `run_resets` does this for any module that takes `mask` and `cu_seqlens`: what lies before each row's first reset is
# a padded batch, and what comes after is packed sequences. Nothing passes from one sequence to another, not even NaN.
# Scans put transitions of 0 at the resets instead (`cut_transitions`).


def check_reset(x: Tensor, reset: Tensor, cu_seqlens: Tensor | None) -> None:
    """Refuse a reset that does not fit x, (B, L, ...)."""
    _require_booleans("reset", reset, x, "a sequence starts")
    if cu_seqlens is not None:
        raise ValueError(
            "reset and cu_seqlens are both given; expected one: packed sequences start anew at each border"
        )


def cut_transitions(
    a: Tensor, reset: Bool[Tensor, "B L"], n_dimensions: int, reverse: bool = False
) -> Shaped[Tensor, "B L *channels"]:
    """Put transitions of 0 where a sequence starts, without a gradient.

    Args:
        a: transitions whose shape broadcasts to the inputs', (B, L, *channels).
        reset: True at the first step of each new sequence.
        n_dimensions: those of the inputs.
        reverse: whether the scan walks from the last step to the first; the state then enters a sequence's last step.
    """
    if reverse:
        reset = torch.cat([reset[:, 1:], torch.zeros_like(reset[:, :1])], 1)
    return torch.where(
        reset.view(*reset.shape, *[1] * (n_dimensions - 2)), torch.zeros((), dtype=a.dtype, device=a.device), a
    )


def run_resets(
    run: Callable[..., tuple[Tensor, Any]],
    x: Shaped[Tensor, "B L *rest"],
    state: Any,
    reset: Bool[Tensor, "B L"],
    *,
    mask: Bool[Tensor, "B L"] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Run a module over sequences that start inside a call.

    Args:
        run: the module, `(x, state, mask=..., cu_seqlens=...) -> (y, state)`, either keyword or none given.
        x: its input.
        state: what the steps before left; None is the start of every stream.
        reset: True at the first step of each new sequence. At padding, the next counted step is the first.
        mask: True where a step counts.
        cu_seqlens: refused, so that callers need not.

    Returns:
        y, zeros at padding, and the state after each row's last sequence: `Ragged` if their layouts differ.
    """
    check_reset(x, reset, cu_seqlens)
    check_lengths(x, mask, None)
    reset, counts = reset.cpu(), torch.ones_like(reset, device="cpu") if mask is None else mask.cpu()
    if not bool(reset.any()):
        return run(x, state, **_masked(counts, x))
    number = reset.cumsum(1)  # of the sequence in its row that each step belongs to
    longest = int((number == 0).sum(1).max())
    y, last = run(x[:, :longest], state, **_masked((counts & (number == 0))[:, :longest], x))
    n_new = number[:, -1]
    new = (counts & (number > 0)).flatten()
    sequences = ((n_new.cumsum(0) - n_new)[:, None] + number - 1).flatten()[new]
    lengths = torch.bincount(sequences, minlength=int(n_new.sum()))
    places = new.nonzero()[:, 0].to(x.device)
    borders = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    y_new, last_new = run(x.flatten(0, 1).index_select(0, places)[None], None, cu_seqlens=borders)
    y = y.to(y_new.dtype)  # which no steps at all need not have under autocast
    padding = y.new_zeros(len(x), x.shape[1] - longest, *y.shape[2:])
    y = torch.cat([y, padding], 1).flatten(0, 1).index_copy(0, places, y_new[0])
    return y.unflatten(0, x.shape[:2]), _after(last, last_new, n_new)


def _masked(counts: Tensor, x: Tensor) -> dict[str, Tensor]:
    return {} if bool(counts.all()) else {"mask": counts.to(x.device)}


def _after(last: Any, last_new: Any, n_new: Tensor) -> Any:
    """The state after each row: of its last new sequence, or, if it has none, of what it began with."""
    old, ended = (n_new == 0).nonzero()[:, 0], n_new.nonzero()[:, 0]
    groups = (old, select(last, old)), (ended, select(last_new, n_new.cumsum(0)[ended] - 1))
    return _in_order([(rows.tolist(), state) for rows, state in groups])


# --- run any module under the contract over sequences of different lengths, padded or packed ---
#
#     y, state = run_lengths(run, x, state, mask=mask)               mask (B, L), True where a step counts
#     y, state = run_lengths(run, x, state, cu_seqlens=cu_seqlens)   x (1, T, ...), N sequences, a state of batch N
#
# There are two ways. A recurrence lets its state pass through padding (a = 1, b = 0): it takes a mask itself, and
# packed sequences become padded batches. Everything else runs in pieces, for a stream may be cut anywhere: all
# sequences together up to the end of the shortest, then those that are left. There are as many calls as different
# lengths, no step is wasted, and dropout draws again in each call.


_Run = Callable[..., tuple[Tensor, Any]]
"""`(x, state) -> (y, state)`; one that lets its state pass through padding is `(x, state, mask) -> (y, state)`."""


def run_lengths(
    run: _Run,
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
    """
    if cu_seqlens is not None:
        cu_seqlens = on_host(cu_seqlens)
    check_lengths(x, mask, cu_seqlens)
    if not skips_padding or isinstance(state, Ragged):
        return _in_pieces(run, x, state, mask, cu_seqlens)
    if cu_seqlens is None:
        return run(x, state, mask)
    packed = PackedSequences(cu_seqlens, x)
    outputs, states = [], []
    for group, padded, entering in zip(packed.groups, packed.padded(x), packed.states(state)):
        y, last = run(padded, entering, group.is_step)
        outputs.append(y)
        states.append(last)
    return packed.packed(outputs), packed.in_order(states)


def _in_pieces(run: _Run, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Any]:
    """Pieces within which all sequences have one length and stand at one place."""
    steps = _counted_steps(x, mask, cu_seqlens)
    _check_streams(state, len(steps))
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
        numbers = pieces[0].sequences
        if isinstance(state, Ragged):
            current = concatenate([state.states[number] for number in numbers])
        else:
            current = select(state, torch.tensor(numbers, device="cpu"))
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


def _in_order(finished: list[tuple[list[int], Any]]) -> Any:
    """Put the states of groups of sequences together, in the order of the sequences."""
    order = torch.tensor([number for numbers, _ in finished for number in numbers], device="cpu").argsort()
    if len({layout(state) for _, state in finished}) == 1:
        return select(concatenate([state for _, state in finished]), order)
    singles = [single for _, state in finished for single in split(state)]
    return batch([singles[place] for place in order.tolist()])
