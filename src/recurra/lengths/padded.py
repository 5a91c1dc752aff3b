"""Padded batches: a mask (B, L) is True where a step counts.

Padding may stand anywhere in a sequence. Each sequence gets exactly the outputs, last state and gradients that its
counted steps would give alone; positions and segments count these steps only. Outputs at padding are zeros, and nothing
that stands there in the input is read, not even NaN. A sequence without a counted step keeps its state.
"""

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from recurra.checks import kind_of, require_tensor, sentence
from recurra.lengths.packed import check_cu_seqlens


def check_lengths(x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Refuse a mask or borders that do not fit x, (B, L, ...).

    Raises:
        TypeError: the mask is not a boolean tensor, or as `check_cu_seqlens`.
        ValueError: the mask does not have x's shape (B, L), both are given, or as `check_cu_seqlens`.
    """
    if mask is not None and cu_seqlens is not None:
        raise ValueError("mask and cu_seqlens are both given; expected one: packed sequences have no padding")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *x.shape[:2])
    if mask is None:
        return
    require_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(sentence("mask", kind_of(mask), "booleans, True where a step counts", "use mask.bool()"))
    if mask.shape != x.shape[:2]:
        raise ValueError(
            sentence("mask", f"of shape {tuple(mask.shape)}", f"(B, L) = {tuple(x.shape[:2])}, as the input")
        )


def blank(x: Shaped[Tensor, "B L *rest"], mask: Bool[Tensor, "B L"] | None) -> Shaped[Tensor, "B L *rest"]:
    """Put zeros where a step does not count, without a gradient: nothing that stands there is read, not even NaN."""
    return x if mask is None else x.masked_fill(~_along(mask, x), 0)


def keep(a: Shaped[Tensor, "B L *rest"], mask: Bool[Tensor, "B L"] | None) -> Shaped[Tensor, "B L *rest"]:
    """Put transitions of 1 where a step does not count: the state passes through."""
    return a if mask is None else a.masked_fill(~_along(mask, a), 1)


def _along(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))
