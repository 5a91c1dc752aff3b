"""Activation checkpointing over the blocks of a model: less memory, for one more forward pass of each block."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recurra.checks import sentence


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """List the blocks of a model: the entries of its own module lists."""
    return [block for child in model.children() if isinstance(child, nn.ModuleList) for block in child]


def recompute_blocks(model: nn.Module) -> None:
    """Let every block of `model` keep its inputs alone for the backward pass, and compute the rest again there.

    Outputs and gradients stay the same, dropout included. Without gradients nothing changes. (Chen et al., arXiv
    1604.06174.)

    Raises:
        ValueError: the model has no blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        came = f"true, and {type(model).__name__} has none"
        raise ValueError(sentence("training.checkpoint_blocks", came, "false for this model"))
    for block in blocks:
        # A partial of a bound method, because copies of the model then call their own blocks.
        block.forward = partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*given, **named)
    return checkpoint(forward, *given, use_reentrant=False, **named)
