"""Feed tokens to a model, for one stream or for many that stand at different places."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.checks import kind_of, sentence
from recurra.state import concatenate_alike, select, split

TOKENS_PER_CALL = 4096
"""Maximum number of tokens, over all rows, that a model gets in one call: it bounds the memory that a text takes."""


class FeedRequest(NamedTuple):
    """Tokens for one stream, and the state to start from; None is the start of a stream."""

    tokens: Int[Tensor, " L"]
    state: Any


class FeedResult(NamedTuple):
    """The logits after a request's last token, and the state there."""

    logits: Float[Tensor, " V"]
    state: Any


def require_evaluation_mode(model: nn.Module) -> None:
    """Refuse a model that is in training mode, wholly or in part: its dropout would be active.

    Raises:
        ValueError: it is.
    """
    if any(module.training for module in model.modules()):
        came = f"a {type(model).__name__} in training mode, where dropout is active"
        raise ValueError(sentence("model", came, "one in evaluation mode", "call model.eval() first"))


@torch.inference_mode()
def feed(model: nn.Module, tokens: Int[Tensor, "B L"], state: Any = None) -> tuple[Float[Tensor, "B V"], Any]:
    """Feed each row at least one token; give the logits after the last token, and the state. There are no gradients.

    If the model has the methods `hidden` and `head`, as all our language models do, no other logits are computed. Long
    texts are fed in pieces, so memory does not grow with them. A single token goes to the model's `forward`, which may
    have a faster way for it (`recurra.decoding`).

    Raises:
        ValueError: there is no token.
    """
    _require_tokens(tokens)
    for piece in tokens.split(max(1, TOKENS_PER_CALL // len(tokens)), 1):
        read, head = _parts(model, piece)
        out, state = read(piece, state)
    return head(out[:, -1]), state


@torch.inference_mode()
def feed_last(
    model: nn.Module, tokens: Int[Tensor, "B L"], state: Any, n_last: int
) -> tuple[Float[Tensor, "B n V"], Any]:
    """Feed each row at least one token in one call; give the logits after its `n_last` last tokens, and the state.

    Raises:
        ValueError: there is no token.
    """
    _require_tokens(tokens)
    read, head = _parts(model, tokens)
    out, state = read(tokens, state)
    return head(out[:, -n_last:]), state


def _parts(model: nn.Module, tokens: Tensor) -> tuple[Callable[..., tuple[Tensor, Any]], Callable[[Tensor], Tensor]]:
    """What reads tokens, and what makes logits of the steps that are chosen from its outputs."""
    if tokens.shape[1] > 1 and inspect.ismethod(getattr(model, "hidden", None)) and hasattr(model, "head"):
        return model.hidden, model.head  # type: ignore[return-value]
    return model, Tensor.clone  # a copy: a view of the last steps would keep those of all steps alive


def _require_tokens(tokens: Tensor) -> None:
    if not tokens.numel():
        raise ValueError(sentence("tokens", kind_of(tokens), "at least one stream and one token"))


def feed_together(model: nn.Module, requests: Sequence[FeedRequest]) -> list[FeedResult]:
    """Feed several streams, batched as far as possible; each gets the result that it would get alone.

    Streams whose states have the same layout form a batch, which shrinks whenever one of them reaches the end of its
    text. All states of a recurrence have one layout, except at the start of a stream. The layout of a segment-level
    model's state depends on the place in the segment, so only streams at the same place are batched.

    Results agree with those of a stream alone to the precision of the model's arithmetic, not bit for bit: matrix
    products of several rows round differently from those of one row.

    Raises:
        ValueError: a request has no token.
    """
    order = sorted(range(len(requests)), key=lambda number: len(requests[number].tokens))  # the shortest text first
    results: dict[int, FeedResult] = {}
    for places, state in concatenate_alike([requests[number].state for number in order]):
        numbers = [order[place] for place in places]
        results.update(zip(numbers, _feed_group(model, [requests[number].tokens for number in numbers], state)))
    return [results[number] for number in range(len(requests))]


def _feed_group(model: nn.Module, texts: Sequence[Tensor], state: Any) -> Iterator[FeedResult]:
    """Feed the streams of one batched state, the shortest text first."""
    done = n_read = 0
    for length, same_length in groupby(map(len, texts)):
        n_done = len(list(same_length))
        logits, state = feed(model, torch.stack([text[n_read:length] for text in texts[done:]]), state)
        done, n_read = done + n_done, length
        ended, state = (
            (state, None) if done == len(texts) else (select(state, slice(n_done)), select(state, slice(n_done, None)))
        )
        # Copies: what a stream keeps must not keep the batch alive.
        yield from map(FeedResult, map(Tensor.clone, logits[:n_done]), split(ended))
