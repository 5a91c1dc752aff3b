"""The workspace of a compiled step: intermediate results whose times of use do not meet lie in the same memory.

A recorded step's tensors all exist at once, and for 64 rows of a large model no cache holds them. One after the other
in the same memory, they fit.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recurra.decoding.instructions import Instruction, Place

_ALIGNMENT = 64  # bytes: a cache line


class _Use(NamedTuple):
    """The instructions from the first to the last that name a storage, and its size in bytes."""

    first: int
    last: int
    size: int


def share_workspace(
    instructions: Sequence[Instruction], kept: Sequence[Tensor], lasting: Collection[int]
) -> tuple[list[Instruction], list[Tensor]]:
    """Move storages into one tensor, where they lie beside those in use at the same time.

    Args:
        instructions: what is run, in order.
        kept: the memory that they name.
        lasting: storages that stay where they are: constants, and what each call brings anew.

    Returns:
        The instructions with their new places, and the memory that they name now.
    """
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    uses: dict[int, _Use] = {}
    for number, instruction in enumerate(instructions):
        for storage, _ in instruction.places:
            if storage not in lasting:
                uses[storage] = _Use(uses[storage].first if storage in uses else number, number, sizes[storage])
    starts, size = _arrange(uses)
    shared = torch.empty(size, dtype=torch.uint8, device="cpu")
    base = shared.untyped_storage().data_ptr()
    moved = [
        instruction._replace(
            places=[
                Place(base, starts[storage] + offset) if storage in starts else Place(storage, offset)
                for storage, offset in instruction.places
            ]
        )
        for instruction in instructions
    ]
    return moved, [*(tensor for tensor in kept if tensor.untyped_storage().data_ptr() in lasting), shared]


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
