"""Cutting a sequence into blocks of equal length."""

import torch
from jaxtyping import Shaped
from torch import Tensor


def into_blocks(x: Shaped[Tensor, "B L H d"], size: int, padding: float) -> Shaped[Tensor, "B H blocks n d"]:
    """Cut into blocks of `size` steps; the last is filled up with `padding`."""
    missing = -x.shape[1] % size
    if missing:
        filler = torch.full((x.shape[0], missing, *x.shape[2:]), padding, dtype=x.dtype, device=x.device)
        x = torch.cat([x, filler], 1)
    return x.transpose(1, 2).unflatten(2, (-1, size))
