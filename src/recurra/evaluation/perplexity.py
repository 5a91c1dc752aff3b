"""From a summed negative log-likelihood to the figures that language models are compared by.

Both take the sum and the number of tokens, not a mean of means: batches of different sizes weigh as
they should.
"""

import math
import operator


def perplexity(total_negative_log_likelihood: float, n_tokens: int) -> float:
    """exp(total / n_tokens): how many equally likely tokens the model hesitates between.

    Args:
        total_negative_log_likelihood: the sum over all tokens, in nats.
        n_tokens: how many tokens that sum is over.

    Returns:
        The perplexity: infinity where it is beyond what a float holds, NaN where the total is NaN.

    Raises:
        ValueError: n_tokens is less than 1.
        TypeError: n_tokens is not a whole number.
    """
    nats = _nats_per_token(total_negative_log_likelihood, n_tokens)
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def bits_per_token(total_negative_log_likelihood: float, n_tokens: int) -> float:
    """total / (n_tokens ln 2), the base-2 logarithm of the perplexity; arguments and errors as `perplexity`.

    Finite wherever the total is, also where the perplexity is not.
    """
    return _nats_per_token(total_negative_log_likelihood, n_tokens) / math.log(2.0)


def _nats_per_token(total: float, n_tokens: int) -> float:
    count = operator.index(n_tokens)
    if count < 1:
        raise ValueError(f"n_tokens must be at least 1, got {count}: was the data empty, or every target ignored?")
    return float(total) / count
