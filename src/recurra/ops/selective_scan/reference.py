"""The selective scan in plain operations: all steps at once, or in pieces of time."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recurra.ops._operator import transforms_are_active
from recurra.ops.scan.operator import linear_scan
from recurra.state import last_step

MOST_AT_ONCE, PIECE = 2**23, 2**21
"""Numbers in the states of all steps up to which they are computed at once, and in a piece's otherwise. Measured on one
core: larger tensors cost page faults, smaller pieces the time between operations."""


def at_once(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    """Compute it with the states of all steps in memory: (B, L, N, D), channels dense."""
    with torch.autocast(x.device.type, enabled=False):  # the product with c would round states to bfloat16
        transitions = torch.exp(step[:, :, None] * a.t())
        h = linear_scan(transitions, (step * x)[:, :, None] * b[..., None], h0)
        return (c[:, :, None] @ h)[:, :, 0], last_step(h, h0)


def in_pieces(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    """Compute long sequences in pieces of time, of which only the states between them stay in memory."""
    per_step = x.shape[0] * a.numel()
    if torch.compiler.is_compiling() or transforms_are_active() or x.shape[1] * per_step <= MOST_AT_ONCE:
        return at_once(x, step, a, b, c, h0)
    outputs, h, size = [], h0, max(PIECE // per_step, 1)
    for x_now, step_now, b_now, c_now in zip(*(along.split(size, 1) for along in (x, step, b, c))):
        inputs = x_now, step_now, a, b_now, c_now, h
        if torch.is_grad_enabled():
            y, h = checkpoint(at_once, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            y, h = at_once(*inputs)
        outputs.append(y)
    return torch.cat(outputs, 1), h
