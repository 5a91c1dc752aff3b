"""What selective state space models share: the recurrence of one diagonal model a channel, groups of heads, and step
sizes."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recurra.checks import require
from recurra.kernels.operators import transforms_are_active
from recurra.scan import linear_scan
from recurra.state import last_step

MOST_AT_ONCE, PIECE = 2**23, 2**21
"""Numbers in the states of all steps up to which they are computed at once, and in a piece's otherwise. Measured on one
core (docs/decisions.md): larger tensors cost page faults, smaller pieces the time between operations."""


def selective_scan(
    x: Float[Tensor, "B L D"],
    step: Float[Tensor, "B L D"],
    a: Float[Tensor, "D N"],
    b: Float[Tensor, "B L N"],
    c: Float[Tensor, "B L N"],
    h0: Float[Tensor, "B N D"],
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B N D"]]:
    """Compute h_t = exp(step_t a) h_{t-1} + step_t x_t b_t and y_t = c_t h_t for every channel's own modes.

    A step of 0 lets the state pass. Long sequences run in pieces of time, and the backward pass computes the states of
    each piece again (as the published kernel does, Gu & Dao, section 3.3.2): only x, step, b, c and the states between
    pieces stay in memory. Traces, and torch.func, take all steps at once.

    Args:
        x: the input, float32 or float64 like all others.
        step: the step sizes, Delta.
        a: eigenvalues, below 0 for modes that decay.
        b, c: how the modes read and are read, the same for all channels.
        h0: the state before the first step.

    Returns:
        y and the last state.
    """
    per_step = x.shape[0] * a.numel()
    if torch.compiler.is_compiling() or transforms_are_active() or x.shape[1] * per_step <= MOST_AT_ONCE:
        return _all_at_once(x, step, a, b, c, h0)
    outputs, h, size = [], h0, max(PIECE // per_step, 1)
    for x_now, step_now, b_now, c_now in zip(*(along.split(size, 1) for along in (x, step, b, c))):
        inputs = x_now, step_now, a, b_now, c_now, h
        if torch.is_grad_enabled():
            y, h = checkpoint(_all_at_once, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            y, h = _all_at_once(*inputs)
        outputs.append(y)
    return torch.cat(outputs, 1), h


def _all_at_once(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    """`selective_scan` with the states of all steps in memory, (B, L, N, D): channels lie side by side."""
    with torch.autocast(x.device.type, enabled=False):  # the product with c would round states to bfloat16
        transitions = torch.exp(step[:, :, None] * a.t())
        h = linear_scan(transitions, (step * x)[:, :, None] * b[..., None], h0)
        return (c[:, :, None] @ h)[:, :, 0], last_step(h, h0)


def spread_over_heads(groups: Float[Tensor, "B L G N"], n_heads: int) -> Float[Tensor, "B L H N"]:
    """Give every head what its group has; `n_heads` is a multiple of the groups."""
    *along, n_groups, size = groups.shape
    return groups[..., None, :].expand(*along, n_groups, n_heads // n_groups, size).flatten(2, 3)


def inverse_softplus_of_steps(n_steps: int, smallest: float, largest: float) -> Float[Tensor, " n_steps"]:
    """Draw step sizes, their logarithms uniformly, and return what softplus turns into them (Gu & Dao, section 3.6).

    Raises:
        ValueError: the sizes are not positive, or the smallest is above the largest.
    """
    require(smallest > 0, "min_step", smallest, "a number above 0")
    require(smallest <= largest, "min_step", smallest, f"at most max_step = {largest}")
    low, high = math.log(smallest), math.log(largest)
    step = torch.exp(low + (high - low) * torch.rand(n_steps))
    return step + torch.log(-torch.expm1(-step))
