import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurra.generation import keep_top_p


def by_hand(row: list[float], p: float) -> list[bool]:
    """Take the likeliest tokens, one after the other, until they hold p; then those that equal the last."""
    weights = [math.exp(value - max(row)) for value in row]
    order = sorted(range(len(row)), key=lambda token: -weights[token])
    held, last = 0.0, 0.0
    for token in order:
        held, last = held + weights[token] / sum(weights), weights[token]
        if held >= p:
            break
    return [weight >= last for weight in weights]


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_the_fewest_that_hold_p_stay(p):
    logits = torch.randn(2, 20, 37, dtype=torch.float64) * 2
    kept = keep_top_p(logits, p)
    assert (kept > -torch.inf).flatten(0, 1).tolist() == [by_hand(row, p) for row in logits.flatten(0, 1).tolist()]
    assert torch.equal(kept[kept > -torch.inf], logits[kept > -torch.inf])


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8), st.sampled_from([0.01, 0.3, 0.7, 0.97]))
def test_with_ties(values, p):
    logits = torch.tensor(values, dtype=torch.float64)
    kept = keep_top_p(logits, p) > -torch.inf
    assert kept.tolist() == by_hand(logits.tolist(), p)
    assert kept[logits.argmax()]


def test_one_token_always_stays():
    assert keep_top_p(torch.tensor([0.0, 9.0, 1.0]), 1e-12).tolist() == [-torch.inf, 9.0, -torch.inf]


def test_a_p_of_1_keeps_what_is_too_unlikely_for_the_sum():
    logits = torch.tensor([0.0, -90.0, -100.0])
    assert torch.equal(keep_top_p(logits, 1.0), logits)


def test_half_precision_comes_out_as_float32():
    assert keep_top_p(torch.randn(5).bfloat16(), 0.5).dtype == torch.float32


@pytest.mark.parametrize("p", [0.0, -0.1, 1.1, float("nan")])
def test_impossible_p(p):
    with pytest.raises(ValueError, match="p is"):
        keep_top_p(torch.zeros(3), p)
