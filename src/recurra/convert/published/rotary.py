"""Rotary attention of transformers: channel i of a head turns with i + n / 2, and here 2i turns with 2i + 1."""

from collections.abc import Sequence

import torch
from torch import Tensor

from recurra.checks import require
from recurra.convert.published.rules import Rule
from recurra.convert.published.settings import Settings


def take_rotation(settings: Settings, share: float) -> tuple[float, float]:
    """Take the base of the angles and the share of the channels that turn, which is `share` by default.

    Both are in `rope_parameters`, or in older files beside it.

    Raises:
        ValueError: an entry is something else, or the angles are not those of a plain rotation.
    """
    rotation = settings.section("rope_parameters")
    base = rotation.number("rope_theta", settings.number("rope_theta", 10000.0))
    share = rotation.number("partial_rotary_factor", settings.number("partial_rotary_factor", share))
    require(0 <= share <= 1, "partial_rotary_factor", share, "a share from 0 to 1")
    rotation.only("rope_type", "default")
    rotation.only("type", "default")  # its name in older files
    rotation.finish()
    settings.only("rope_scaling", None)
    return base, share


def turned_pairs(d_head: int, n_rotated: int) -> Tensor:
    """The order of a head's channels, as numbers of theirs."""
    halves = torch.arange(n_rotated).view(2, -1)
    return torch.cat([halves.T.flatten(), torch.arange(n_rotated, d_head)])


def reordered(weight: Tensor, order: Tensor) -> Tensor:
    """Bring the rows of every head into an order."""
    return weight.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


def qkv_rule(own: str, theirs: Sequence[str], n_heads: int, n_kv_heads: int, order: Tensor) -> Rule:
    """The projections of queries, keys and values, one matrix here, of heads whose channels come in `order`."""
    rows, back = [n * len(order) for n in (n_heads, n_kv_heads, n_kv_heads)], torch.argsort(order)

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([reordered(q, order), reordered(k, order), v])

    def write(qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.split(rows)
        return reordered(q, back), reordered(k, back), v

    return Rule(own, tuple(theirs), read, write)
