"""The state of attention over a sliding window: the keys and values of the last steps."""

from typing import TypeVar

import torch
from torch import Tensor

from recurra.checks import require, sentence

Steps = TypeVar("Steps", bound=tuple[Tensor, ...])


def check_window(window: int | None) -> None:
    """Refuse an empty window.

    Raises:
        ValueError: it is below 1.
    """
    fits = window is None or window >= 1
    require(fits, "window", window, "at least 1, the step itself, or None for all steps")


def after(state: Steps | None, new: Steps, window: int | None) -> Steps:
    """Append the steps of a call, a NamedTuple of tensors (B, L, ...), to those in the state.

    Raises:
        ValueError: the state holds as many steps as the window or more, so it comes from a longer window.
    """
    if state is None:
        return new
    n_steps = state[0].shape[1]
    if window is not None and n_steps >= window:
        mend = "start a new stream after changing the window"
        raise ValueError(sentence("state", f"{n_steps} steps long", f"fewer than window = {window}", mend))
    return type(new)(*(torch.cat(pair, 1) for pair in zip(state, new)))


def still_seen(known: Steps, window: int | None) -> Steps:
    """Give the steps that the next one sees, at most window - 1. Copies, as a view would keep all steps of a call."""
    n_steps = known[0].shape[1]
    kept = n_steps if window is None else min(n_steps, window - 1)
    if kept == n_steps:
        return known
    return type(known)(*(x[:, n_steps - kept :].clone() for x in known))
