"""A state that is the last steps themselves: what a layer with a sliding window keeps."""

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from recurra.checks import require

Seen = TypeVar("Seen", bound=tuple[Tensor, ...])


def most_kept(window: int | None) -> int | None:
    """Return how many steps a layer with this window keeps at most: all but the step itself; None for no limit.

    Raises:
        ValueError: the window is below 1.
    """
    require(window is None or window >= 1, "window", window, "at least 1, the step itself, or None for all steps")
    return None if window is None else window - 1


def after(state: Seen, new: Seen) -> Seen:
    """Append the steps of a call, a NamedTuple of tensors (B, L, ...), to those that the state holds."""
    return type(new)(*(torch.cat(pair, 1) for pair in zip(state, new))) if state[0].shape[1] else new


def still_seen(known: Seen, window: int | None) -> Seen:
    """Return what the next step sees, at most window - 1 steps. Copies: a view would keep all steps of a call alive."""
    n_steps = known[0].shape[1]
    kept = n_steps if window is None else min(n_steps, window - 1)
    return type(known)(*(x[:, n_steps - kept :].clone() for x in known))


def windows(n_queries: int, n_keys: int, window: int) -> Iterator[tuple[int, int, int, int]]:
    """Split the last `n_queries` of `n_keys` steps into pieces of at most `window`, with the keys that they see.

    Attention piece by piece takes memory proportional to the number of queries.

    Yields:
        start and stop of a piece among the queries, first and last (exclusive) of its keys.
    """
    before = n_keys - n_queries
    for start in range(0, n_queries, window):
        stop = min(start + window, n_queries)
        yield start, stop, max(0, before + start - window + 1), before + stop
