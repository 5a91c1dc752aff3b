"""A state that is the last steps themselves: what a layer keeps that sees a sliding window of steps."""

from typing import TypeVar

import torch
from torch import Tensor

Steps = TypeVar("Steps", bound=tuple[Tensor, ...])


def check_window(window: int | None) -> None:
    """Refuse a window of no steps.

    Raises:
        ValueError: it is below 1.
    """
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected at least 1, the step itself, or None for all steps")


def after(state: Steps | None, new: Steps, window: int | None) -> Steps:
    """Put the steps of a call, a NamedTuple of tensors (B, L, ...), behind those that the state holds.

    Raises:
        ValueError: the state has as many steps as the window, or more: it comes from a longer one.
    """
    if state is None:
        return new
    n_steps = state[0].shape[1]
    if window is not None and n_steps >= window:
        raise ValueError(
            f"state has {n_steps} steps; with window {window} there are fewer: start the stream anew when the window "
            "changes"
        )
    return type(new)(*(torch.cat(pair, 1) for pair in zip(state, new)))


def still_seen(known: Steps, window: int | None) -> Steps:
    """Give what the next step sees, window - 1 steps at most. Copies: a view would hold on to all steps of a call."""
    n_steps = known[0].shape[1]
    kept = n_steps if window is None else min(n_steps, window - 1)
    if kept == n_steps:
        return known
    return type(known)(*(x[:, n_steps - kept :].clone() for x in known))
