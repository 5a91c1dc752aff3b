"""Tensors of another code base in which the rows of several matrices take turns, head by head."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recurra.checks import sentence


class Fused(NamedTuple):
    """A matrix whose rows are those of one group of heads after the other, and within a group part by part.

    name: the matrix there.
    parts: names for the parts, which rules know as `NAME[PART]`.
    n_groups: groups of heads.
    sizes: rows of every part in one group.
    """

    name: str
    parts: tuple[str, ...]
    n_groups: int
    sizes: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """What rules call the parts."""
        return [f"{self.name}[{part}]" for part in self.parts]


def split_fused(weights: dict[str, Tensor], fused: Sequence[Fused], what: str) -> dict[str, Tensor]:
    """Replace fused matrices by their parts; those that are missing stay so.

    Raises:
        ValueError: a matrix has another number of rows.
    """
    weights = dict(weights)
    for one in fused:
        if (whole := weights.pop(one.name, None)) is None:
            continue
        n_rows = one.n_groups * sum(one.sizes)
        if whole.dim() != 2 or len(whole) != n_rows:
            came = tuple(whole.shape)
            raise ValueError(
                sentence(f"the shape of {one.name} in {what}", came, f"{n_rows} rows, as its config.json says")
            )
        parts = whole.unflatten(0, (one.n_groups, -1)).split(list(one.sizes), 1)
        weights |= zip(one.names, (part.flatten(0, 1) for part in parts), strict=True)
    return weights


def join_fused(weights: dict[str, Tensor], fused: Sequence[Fused]) -> dict[str, Tensor]:
    """The way back of `split_fused`."""
    weights = dict(weights)
    for one in fused:
        parts = [weights.pop(name).unflatten(0, (one.n_groups, -1)) for name in one.names]
        weights[one.name] = torch.cat(parts, 1).flatten(0, 1)
    return weights
