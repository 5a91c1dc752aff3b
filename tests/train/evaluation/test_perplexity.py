import math

import pytest

from recurra.train.evaluate import perplexity


def test_a_uniform_guess_has_the_size_of_the_vocabulary():
    assert perplexity(1000 * math.log(51), 1000) == pytest.approx(51, rel=1e-12)


def test_overflow_is_infinite():
    # exp overflows just above 709.78
    assert math.isfinite(perplexity(709.0, 1))
    assert perplexity(710.0, 1) == perplexity(math.inf, 3) == math.inf


@pytest.mark.parametrize("n_tokens", [0, -1])
def test_no_tokens_is_an_error(n_tokens):
    with pytest.raises(ValueError, match=f"n_tokens is {n_tokens}; expected at least 1"):
        perplexity(1.0, n_tokens)
