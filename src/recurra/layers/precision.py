"""Precision and memory of recurrent states: entering a layer, and leaving it."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32, in which recurrences run and states are kept; keep other dtypes."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def entering_state(h: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Give the state before the first step in the dtype of `like`: zeros at the start of a stream (h is None).

    Raises:
        ValueError: the state is of another shape: it comes from another batch, or from a layer of another size.
    """
    if h is None:
        return like.new_zeros(shape)
    if tuple(h.shape) != shape:
        raise ValueError(
            f"state.h is of shape {tuple(h.shape)}; this input and this layer go on from {shape}: one state per row of "
            "the batch (`recurra.state.select` takes rows out), made by a layer of the same size"
        )
    return h.to(like.dtype)


def last_state(h: Tensor, h0: Tensor) -> Tensor:
    """Give the state after the last of the steps (B, L, ...), or h0 if there are none.

    It owns its memory: a view would keep the states of all steps alive.
    """
    return h[:, -1].clone() if h.shape[1] else h0
