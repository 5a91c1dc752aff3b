"""The form of a compiled step: a table with one row of integers for every instruction.

Memory is named by a base and an offset in bytes. Base 0 is address 0, so its offsets are addresses that stay (weights,
constants, intermediate results); the other bases are the tensors of one call: tokens, the state that enters, outputs.

    LINEAR     out (n0, n2) = c (W a) + d              a (n0, n1), b the matrix W as `kind` says, c and d (n2); if n3 is
               above 1, matrices lie n3 bytes apart, and e is the int64 number of the one that is used, with its c
    MAP        out = function(a, b)                    up to 4 dimensions, the innermost first, with strides in bytes
    NORMALISE  out = (a - mean) / sqrt(var + d) b + c  rows a (n0, n1), b and c (n1), d one number
    LOOK_UP    out (n0, n1) = rows of b (n2, n1)       a: n0 int64 row numbers; one that does not exist ends the run
    SELECT     out (n0, n1, n2) = a selective scan     a and step sizes b like out, eigenvalues c (n3, n2), d and e
               (n0, n1, n3), state f (n0, n3, n2), last state g like f: g = exp(b c) f + b a d, out = sum of e g
    CHOOSE     out (n0, n2) = the n2 largest of every row of a (n0, n1), falling; g (n0, n2), int64, where they are
    ATTEND     out (n0, n1, n3) = attention of queries a to keys and values of earlier steps and the new ones, b and c
               (n0, n2, n3); d lists where those of each row are, e holds rotations, f is memory to compute in
    UPDATE     last state g (n0, n1, n2) = d e + b^T c and out (n0, n2) = a g of n0 matrices, from queries a and keys b
               (n0, n1), values c (n0, n2), decays d (n0, n3) with n3 = n1 or 1, and the state e; of kind 1
               or 3, the delta rule, with f (c - b d e) in place of c and rates f (n0); of kind 4 or 6, the generalised
               delta rule, with f1^T (f0 e) added to g and f (n0, 2, n1); of kind 2, 3 or 6, matrices of e and g are
               int16 codes with a scale; 8 more, g goes past the caches
    REPEAT     run the next n0 rows, all MAPs, n1 times: in each turn their operands lie some bytes further on

All numbers except W's and row numbers are float32, and rows are contiguous. A MAP whose `out` has a stride of 0
reduces: it reads as `a` what it has written; such a dimension is never the innermost one.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LINEAR, MAP, NORMALISE, LOOK_UP, REPEAT, SELECT, CHOOSE, ATTEND, UPDATE = range(9)
KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
"""How a matrix keeps its numbers. In a table, the address of the function that multiplies by it stands for this."""

FUNCTIONS = (
    *(
        "copy",
        "add",
        "sub",
        "mul",
        "div",
        "maximum",
        "minimum",
        "where_positive",
        "where_not_positive",
        "neg",
        "abs",
        "sqrt",
    ),
    *("exp", "sin", "cos", "sigmoid", "silu", "tanh", "gelu", "gelu_tanh", "softplus", "expm1"),
)
"""What a MAP computes; its number is the place in this list. Functions of one argument ignore b. `where_positive` is a
where b is above 0 and 0 elsewhere, `where_not_positive` the reverse."""
LIGHT = FUNCTIONS[: FUNCTIONS.index("sqrt") + 1]
"""Those that take a fifth of the time of the others."""

PAST = 8
"""Added to the kind of an UPDATE whose matrices would have left the caches by the next step."""

OPERANDS, DIMENSIONS = 8, 4
OUT, A, B, C, D, E, F, G = range(OPERANDS)

OPCODE, KIND, BASES = 0, 1, 2
OFFSETS = BASES + OPERANDS
SIZES = OFFSETS + OPERANDS
STRIDES = SIZES + DIMENSIONS
"""Where the parts of a row begin; the strides are those of out, a and b."""
TURNS = STRIDES + 3 * DIMENSIONS
"""How far out, a and b lie from those of the turn before."""
WORDS = TURNS + 3
"""Words in a row."""


class Place(NamedTuple):
    """Where an operand begins: the address of its storage and bytes from there, and how many more in each turn."""

    storage: int
    offset: int
    turn: int = 0


class Instruction(NamedTuple):
    """A row of the table in readable form. `kind` is a MAP's function, or how a LINEAR's matrix is kept."""

    opcode: int
    kind: int
    places: list[Place]
    sizes: list[int]
    strides: tuple[list[int], ...] = ()

    def row(self, bases: dict[int, int]) -> list[int]:
        """Give the row's words; `bases` numbers the storages that every call brings anew."""
        numbers = [bases.get(place.storage, 0) for place in self.places]
        offsets = [place.offset + (0 if number else place.storage) for number, place in zip(numbers, self.places)]
        return [
            *(self.opcode, self.kind, *_filled(numbers, OPERANDS, 0), *_filled(offsets, OPERANDS, 0)),
            *_filled(self.sizes, DIMENSIONS, 1),
            *(word for part in (*self.strides, [], [], [])[:3] for word in _filled(part, DIMENSIONS, 0)),
            *_filled([place.turn for place in self.places[:3]], 3, 0),
        ]


def _filled(words: list[int], count: int, filler: int) -> list[int]:
    return words + [filler] * (count - len(words))


_ALIGNMENT = 64  # bytes: a cache line


class _Use(NamedTuple):
    """The instructions from the first to the last that name a storage, and its size in bytes."""

    first: int
    last: int
    size: int


def without_unused(instructions: Sequence[Instruction], results: Collection[int]) -> list[Instruction]:
    """Leave out what no result depends on; look-ups, which can end a run, and repetitions stay."""
    read, kept = set(results), []
    for instruction, (first, last) in zip(reversed(instructions), reversed(_times(instructions))):
        written = instruction.places[:1] + instruction.places[G:]
        if instruction.opcode == LOOK_UP or last > first or any(place.storage in read for place in written):
            read.update(place.storage for place in instruction.places)
            kept.append(instruction)
    return kept[::-1]


def share_workspace(
    instructions: Sequence[Instruction], kept: Sequence[Tensor], lasting: Collection[int]
) -> tuple[list[Instruction], list[Tensor]]:
    """Move storages into one tensor, where they lie beside those in use at the same time."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    uses: dict[int, _Use] = {}
    for instruction, (first, last) in zip(instructions, _times(instructions)):
        for storage in (place.storage for place in instruction.places):
            if storage not in lasting:
                uses[storage] = _Use(uses[storage].first if storage in uses else first, last, sizes[storage])
    starts, size = _arrange(uses)
    shared = torch.empty(size, dtype=torch.uint8, device="cpu")
    base = shared.untyped_storage().data_ptr()
    moved = [
        instruction._replace(
            places=[
                place._replace(storage=base, offset=starts[place.storage] + place.offset)
                if place.storage in starts
                else place
                for place in instruction.places
            ]
        )
        for instruction in instructions
    ]
    return moved, [*(tensor for tensor in kept if tensor.untyped_storage().data_ptr() in lasting), shared]


def _times(instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """From when to when each instruction needs its memory: of those that are repeated, during all turns."""
    times: list[tuple[int, int]] = []
    for number, instruction in enumerate(instructions):
        if number == len(times):
            count = instruction.sizes[0] if instruction.opcode == REPEAT else 0
            times += [(number, number + count)] * (count + 1)
    return times


def _arrange(uses: dict[int, _Use]) -> tuple[dict[int, int], int]:
    """Give each storage the lowest place that is free while it is in use, and the size of all."""
    starts: dict[int, int] = {}
    placed: list[tuple[int, int, int]] = []  # begin, end, last use
    total = 0
    for storage, use in sorted(uses.items(), key=lambda item: item[1].first):
        placed = [part for part in placed if part[2] >= use.first]  # an instruction's operands must not meet its output
        length, start = -(-use.size // _ALIGNMENT) * _ALIGNMENT, 0
        for begin, end, _ in sorted(placed):
            if begin - start >= length:
                break
            start = max(start, end)
        starts[storage] = start
        placed.append((start, start + length, use.last))
        total = max(total, start + length)
    return starts, total
