"""Perplexity and bits per token from a summed negative log-likelihood.

Both take the sum and the number of tokens, not a mean of means, so that batches of different sizes are weighted
correctly.
"""

import math
import operator

from recurra.checks import require


def perplexity(total_negative_log_likelihood: float, n_tokens: int) -> float:
    """Return exp(total / n_tokens): the number of equally likely tokens that would be as hard to predict.

    Args:
        total_negative_log_likelihood: the sum over all tokens, in nats.
        n_tokens: the number of tokens in that sum.

    Returns:
        The perplexity: infinity if it overflows a float, NaN if the total is NaN.

    Raises:
        ValueError: `n_tokens` is below 1.
        TypeError: `n_tokens` is not an integer.
    """
    nats = _nats_per_token(total_negative_log_likelihood, n_tokens)
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def bits_per_token(total_negative_log_likelihood: float, n_tokens: int) -> float:
    """Return total / (n_tokens ln 2), the base-2 logarithm of the perplexity; arguments and errors as `perplexity`.

    It is finite whenever the total is, even if the perplexity overflows.
    """
    return _nats_per_token(total_negative_log_likelihood, n_tokens) / math.log(2.0)


def _nats_per_token(total: float, n_tokens: int) -> float:
    count = operator.index(n_tokens)
    require(count >= 1, "n_tokens", count, "at least 1", "the data must have a target that is not ignored")
    return float(total) / count
