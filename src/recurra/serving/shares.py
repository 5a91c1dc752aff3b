"""What is told of a token beside the token: its log-probability, and the likeliest outputs in its place."""

from torch import Tensor

from recurra.serving.turns import Share


def shares(logits: Tensor, token: int | None, count: int) -> tuple[float | None, tuple[Share, ...]]:
    """Give the log-probability of a token, and the likeliest outputs with theirs."""
    logprobs = logits.float().log_softmax(-1)
    likeliest: tuple[Share, ...] = ()
    if count:
        top = logprobs.topk(min(count, len(logprobs)))
        likeliest = tuple(map(Share, top.indices.tolist(), top.values.tolist()))
    return None if token is None else float(logprobs[token]), likeliest
