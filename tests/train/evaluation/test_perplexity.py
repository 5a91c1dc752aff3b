import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recurra.train.evaluate import _bits_per_token, perplexity


def test_a_uniform_guess_has_the_size_of_the_vocabulary():
    assert perplexity(1000 * math.log(51), 1000) == pytest.approx(51, rel=1e-12)
    assert _bits_per_token(1000 * math.log(64), 1000) == pytest.approx(6, rel=1e-12)


def test_a_certain_model():
    assert perplexity(0.0, 7) == 1.0
    assert _bits_per_token(0.0, 7) == 0.0


@given(st.floats(0, 1e6), st.integers(1, 10**9))
def test_bits_are_the_logarithm_of_the_perplexity(total, n_tokens):
    value = perplexity(total, n_tokens)
    if math.isfinite(value):
        assert math.log2(value) == pytest.approx(_bits_per_token(total, n_tokens), rel=1e-9, abs=1e-12)


def test_overflow_is_infinite_and_the_bits_stay_finite():
    # exp overflows just above 709.78
    assert math.isfinite(perplexity(709.0, 1))
    assert perplexity(710.0, 1) == math.inf
    assert _bits_per_token(710.0, 1) == pytest.approx(710 / math.log(2), rel=1e-12)
    assert perplexity(math.inf, 3) == _bits_per_token(math.inf, 3) == math.inf


def test_nan_travels():
    assert math.isnan(perplexity(math.nan, 3))
    assert math.isnan(_bits_per_token(math.nan, 3))


@pytest.mark.parametrize("measure", [perplexity, _bits_per_token])
@pytest.mark.parametrize("n_tokens", [0, -1])
def test_no_tokens_is_an_error(measure, n_tokens):
    with pytest.raises(ValueError, match=f"n_tokens is {n_tokens}; expected at least 1"):
        measure(1.0, n_tokens)


@pytest.mark.parametrize("measure", [perplexity, _bits_per_token])
def test_a_fraction_of_a_token_is_an_error(measure):
    with pytest.raises(TypeError):
        measure(1.0, 2.5)
