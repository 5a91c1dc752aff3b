"""One token for every row of a batch, each by its own settings and its own generator."""

from collections.abc import Sequence

from torch import Tensor

from recurra.generation.sampling import greedy
from recurra.serving.turns import Row, Share


def choose(rows: Sequence[Row], logits: Tensor) -> list[int | ValueError]:
    """Choose each row's next token; rows that take the likeliest one are done together.

    Returns:
        A token for every row, or the error of a row that has none to choose: its settings may let logits overflow.
    """
    tokens: list[int | ValueError] = [0] * len(rows)
    plain = [place for place, row in enumerate(rows) if _is_greedy(row)]
    if plain:
        chosen = greedy(logits if len(plain) == len(rows) else logits[plain])
        for place, token in zip(plain, chosen.tolist()):
            tokens[place] = token
    for place in set(range(len(rows))).difference(plain):
        row = rows[place]
        try:
            tokens[place] = row.generation.draw(logits[place], row.recent)
        except ValueError as error:
            tokens[place] = error
    return tokens


def _is_greedy(row: Row) -> bool:
    sampling = row.generation.config.sampling
    return sampling.temperature == 0 and sampling.repetition_penalty == 1


def shares(logits: Tensor, token: int | None, count: int) -> tuple[float | None, tuple[Share, ...]]:
    """Give the log-probability of a token, and the likeliest outputs with theirs."""
    logprobs = logits.float().log_softmax(-1)
    likeliest: tuple[Share, ...] = ()
    if count:
        top = logprobs.topk(min(count, len(logprobs)))
        likeliest = tuple(map(Share, top.indices.tolist(), top.values.tolist()))
    return None if token is None else float(logprobs[token]), likeliest
