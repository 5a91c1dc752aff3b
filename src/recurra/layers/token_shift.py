"""RWKV's token shift: every step beside the one before it (Peng et al. 2023, arXiv 2305.13048, section 3.1)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recurra.layers.precision import at_least_float32


def mixed(
    now: Float[Tensor, "B L D"], previous: Float[Tensor, "B L D"], share: Float[Tensor, " D"]
) -> Float[Tensor, "B L D"]:
    """share * now + (1 - share) * previous."""
    share = at_least_float32(share)
    return share * now + (1 - share) * previous


def with_previous(
    x: Float[Tensor, "B L D"], before: Float[Tensor, "B D"], mask: Bool[Tensor, "B L"] | None
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"], Float[Tensor, "B D"]]:
    """Return x, the counted step before each, and the last counted step: what `before` is in the next call.

    Args:
        x: at least one step.
        before: the last counted step of earlier calls, float32 or better; zeros at the start of a stream.
        mask: True where a step counts. Padding may stand anywhere; what is before it is not read.

    Returns:
        all three in float32 or better, the last one in memory of its own.
    """
    x = at_least_float32(x)
    known = torch.cat([before[:, None], x], 1)
    if mask is None:
        return x, known[:, :-1], known[:, -1].clone()
    steps = torch.arange(1, known.shape[1], device=x.device) * mask
    places = torch.cat([torch.zeros_like(steps[:, :1]), steps], 1).cummax(1).values
    rows = torch.take_along_dim(known, places[..., None], 1)
    return x, rows[:, :-1], rows[:, -1].clone()
