"""What selective state space models share: groups of heads, and step sizes."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.checks import require, require_positive


def spread_over_heads(groups: Float[Tensor, "B L G N"], n_heads: int) -> Float[Tensor, "B L H N"]:
    """Give every head what its group has; `n_heads` is a multiple of the groups."""
    *along, n_groups, size = groups.shape
    return groups[..., None, :].expand(*along, n_groups, n_heads // n_groups, size).flatten(2, 3)


def inverse_softplus_of_steps(n_steps: int, smallest: float, largest: float) -> Float[Tensor, " n_steps"]:
    """Draw step sizes, their logarithms uniformly, and return what softplus turns into them (Gu & Dao, section 3.6).

    Raises:
        ValueError: the sizes are not positive, or the smallest is above the largest.
    """
    require_positive(min_step=smallest, max_step=largest)
    require(smallest <= largest, "min_step", smallest, f"at most max_step = {largest}")
    low, high = math.log(smallest), math.log(largest)
    step = torch.exp(low + (high - low) * torch.rand(n_steps))
    return step + torch.log(-torch.expm1(-step))
