"""Feeding tokens to a model, for one stream or for many that go their own ways."""

import inspect
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.state import concatenate, layout, select, split

TOKENS_A_CALL = 4096
"""What a model is given at once, over all rows: so much memory, and no more, does a long text take."""


class Reading(NamedTuple):
    """What one stream is to read, and from which state on; None is the start of a stream."""

    tokens: Int[Tensor, " L"]
    state: Any


class Read(NamedTuple):
    """What came of it: the logits after the last token, and the state."""

    logits: Float[Tensor, " V"]
    state: Any


def require_evaluation_mode(model: nn.Module) -> None:
    """Raise a ValueError where the model, or a part of it, is in training mode: its dropouts would be at work."""
    if any(module.training for module in model.modules()):
        raise ValueError(
            f"the {type(model).__name__} is in training mode, in which dropout is at work; call model.eval() first"
        )


@torch.inference_mode()
def read(model: nn.Module, tokens: Int[Tensor, "B L"], state: Any = None) -> tuple[Float[Tensor, "B V"], Any]:
    """Feed at least one token a row, and give the logits after the last and the state; no gradients.

    A model with the methods `hidden` and `head`, as all language models here have them, makes no other logits than
    these. Long texts are fed in pieces, so that memory does not grow with them. One token goes to the model as it is:
    it may have a shorter way for that (`recurra.decoding.RecordedStep`).

    Raises:
        ValueError: there is no token.
    """
    if not tokens.numel():
        raise ValueError(f"tokens are of shape {tuple(tokens.shape)}; expected at least one stream and one token")
    by_hidden = tokens.shape[1] > 1 and inspect.ismethod(getattr(model, "hidden", None)) and hasattr(model, "head")
    step = model.hidden if by_hidden else model
    for piece in tokens.split(max(1, TOKENS_A_CALL // len(tokens)), 1):
        out, state = step(piece, state)  # type: ignore[operator]
    # A copy: a view of the last step would keep those of all steps alive.
    return model.head(out[:, -1]) if by_hidden else out[:, -1].clone(), state  # type: ignore[operator]


def read_together(model: nn.Module, readings: Sequence[Reading]) -> list[Read]:
    """Feed several streams, batched as far as that goes; each comes out as if it had been fed alone.

    Streams whose states have the same layout go through the model side by side; the batch gets smaller wherever one of
    them has come to the end of its text. For a recurrence all states have one layout, but for streams at their start.
    A segment-level model's depends on the place in the segment, so its streams go with those at the same place.

    Matrix products of many rows round differently than those of one: results agree with those of a stream alone to
    the precision of the model's arithmetic, not bit for bit.

    Raises:
        ValueError: one of them has no token to read.
    """
    groups: dict[Hashable, list[int]] = {}
    for number, reading in enumerate(readings):
        groups.setdefault(layout(reading.state), []).append(number)
    results: dict[int, Read] = {}
    for numbers in groups.values():
        numbers.sort(key=lambda number: len(readings[number].tokens))
        results.update(zip(numbers, _read_group(model, [readings[number] for number in numbers])))
    return [results[number] for number in range(len(readings))]


def _read_group(model: nn.Module, readings: Sequence[Reading]) -> Iterator[Read]:
    """Feed streams that may be batched, the shortest text first."""
    lengths = [len(reading.tokens) for reading in readings]
    state = concatenate([reading.state for reading in readings])
    done = n_read = 0
    for length, same_length in groupby(lengths):
        n_done = len(list(same_length))
        tokens = torch.stack([reading.tokens[n_read:length] for reading in readings[done:]])
        logits, state = read(model, tokens, state)
        yield from map(Read, map(Tensor.clone, logits[:n_done]), split(select(state, slice(n_done))))
        state = select(state, slice(n_done, None))
        done, n_read = done + n_done, length
