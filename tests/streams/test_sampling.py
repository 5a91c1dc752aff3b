"""The settings for choosing a token, together and one by one, and beside those of the transformers library."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurra.streams.sampling import (
    SamplingConfig,
    apply_temperature,
    distribution,
    draw,
    greedy,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_generated,
    penalise_repetition,
    sample,
)


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_default_draws_by_the_models_own_probabilities():
    logits = torch.randn(40, 17)
    assert torch.equal(sample(logits, SamplingConfig(), generator()), draw(logits, generator()))


def test_the_settings_apply_in_their_order():
    logits, recent, counts = torch.randn(300, 17) * 3, torch.randint(17, (300, 9)), torch.randint(4, (300, 17))
    penalties = {"repetition_penalty": 1.7, "repetition_window": 4, "presence_penalty": 0.6, "frequency_penalty": -0.3}
    filters = {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.1}
    config = SamplingConfig(logit_bias={3: 2.5, 11: -100.0}, **penalties, **filters)
    by_hand = logits.clone()
    by_hand[:, 3] += 2.5
    by_hand[:, 11] -= 100
    by_hand = penalise_generated(penalise_repetition(by_hand, recent[:, 5:], 1.7), counts, 0.6, -0.3)
    by_hand = keep_min_p(keep_top_p(keep_top_k(apply_temperature(by_hand, 1.5), 9), 0.8), 0.1)
    assert torch.equal(sample(logits, config, generator(), recent, counts), draw(by_hand, generator()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0; expected at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
        ({"repetition_window": 0}, "repetition_window is 0; expected a number from 1 to 64"),
        ({"repetition_window": 65}, "repetition_window is 65"),
        ({"repetition_window": 8}, "repetition_window is 8; expected 64 without a repetition penalty"),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 3}, "top_k is 3; expected None at temperature 0"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan; expected a finite number"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf"),
        ({"logit_bias": {2: float("-inf")}}, r"logit_bias\[2\] is -inf; expected a finite number"),
        ({"logit_bias": {-1: 1.0}}, "a token of logit_bias is -1; expected at least 0"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**settings)


def test_transformers_agrees():
    process = pytest.importorskip("transformers.generation.logits_process")
    logits, recent = torch.randn(64, 301) * 3, torch.randint(301, (64, 40))
    for ours, theirs in (
        (apply_temperature(logits, 0.7), process.TemperatureLogitsWarper(0.7)),
        (keep_top_k(logits, 20), process.TopKLogitsWarper(20)),
        (keep_top_p(logits, 0.83), process.TopPLogitsWarper(0.83)),
        (keep_min_p(logits, 0.03), process.MinPLogitsWarper(0.03)),
        (penalise_repetition(logits, recent, 1.4), process.RepetitionPenaltyLogitsProcessor(1.4)),
    ):
        assert torch.equal(ours, theirs(recent, logits)), theirs


# --- repetition ---


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 0.4), (-1.5, 0.25)])
def test_penalties_of_generated_tokens_are_openais_formula(presence, frequency):
    logits, counts = torch.randn(5).double(), [0, 1, 5, 0, 300]
    found = penalise_generated(logits, torch.tensor(counts), presence, frequency).tolist()
    assert found == [v - n * frequency - (presence if n else 0.0) for v, n in zip(logits.tolist(), counts)]
    assert penalise_generated(logits.bfloat16(), torch.tensor(counts), presence, frequency).dtype == torch.float32


def test_a_bias_for_a_token_that_does_not_exist():
    with pytest.raises(IndexError):
        sample(torch.zeros(4), SamplingConfig(logit_bias={4: 1.0}), generator())


# --- top-k ---


def test_ties_with_the_last_stay_whatever_their_order():
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 2.0])
    for order in (torch.arange(6), torch.arange(5, -1, -1), torch.randperm(6)):
        kept = keep_top_k(logits[order], 2) > -torch.inf
        assert sorted(order[kept].tolist()) == [1, 2, 3, 5]


def test_fewer_possible_tokens_than_k():
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf])
    assert torch.equal(keep_top_k(logits, 2), logits)


# --- top-p ---


def top_p_by_hand(row: list[float], p: float) -> list[bool]:
    """Take the likeliest tokens, one after the other, until they hold p; then those that equal the last."""
    weights = [math.exp(value - max(row)) for value in row]
    order = sorted(range(len(row)), key=lambda token: -weights[token])
    held, last = 0.0, 0.0
    for token in order:
        held, last = held + weights[token] / sum(weights), weights[token]
        if held >= p:
            break
    return [weight >= last for weight in weights]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8), st.sampled_from([0.01, 0.3, 0.7, 0.97]))
def test_top_p_with_ties(values, p):
    logits = torch.tensor(values, dtype=torch.float64)
    kept = keep_top_p(logits, p) > -torch.inf
    assert kept.tolist() == top_p_by_hand(logits.tolist(), p)
    assert kept[logits.argmax()]


def test_a_p_of_1_keeps_what_is_too_unlikely_for_the_sum():
    logits = torch.tensor([0.0, -90.0, -100.0])
    assert torch.equal(keep_top_p(logits, 1.0), logits)


# --- min-p ---


@pytest.mark.parametrize("keep", [keep_top_k, keep_top_p, keep_min_p, apply_temperature])
def test_half_precision_gives_float32_and_ruled_out_tokens_stay_out(keep):
    kept = keep(torch.tensor([-torch.inf, 1.0, 0.0]).bfloat16(), 1 if keep is keep_top_k else 0.5)
    assert kept.dtype == torch.float32
    assert kept[0] == -torch.inf


# --- the choice ---


def test_greedy_takes_the_first_of_the_likeliest():
    assert greedy(torch.tensor([[1.0, 3.0, 3.0], [-torch.inf, -5.0, -6.0]])).tolist() == [1, 1]
    assert greedy(torch.tensor([0.0, 2.0])).shape == ()


def test_draws_are_as_frequent_as_they_are_probable():
    logits = torch.tensor([0.5, -1.0, 2.0, -torch.inf, 0.0])
    n = 200_000
    counts = draw(logits.expand(n, 5), generator()).bincount(minlength=5)
    expected = logits.softmax(-1)
    deviations = (expected * (1 - expected) / n).sqrt()
    assert counts[3] == 0
    assert bool(((counts / n - expected).abs() <= 5 * deviations).all())


def test_equal_seeds_give_equal_draws_and_the_global_generator_is_not_touched():
    logits = torch.randn(4, 6, 31)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, two, other = (draw(logits, generator(seed)) for seed in (7, 7, 8))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert one.shape == (4, 6)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert draw(logits[0, 0], generator()).shape == ()


def test_a_single_possible_token_is_drawn():
    logits = torch.full((50, 9), -torch.inf)
    logits[:, 4] = -80.0
    assert draw(logits.half(), generator()).eq(4).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("choose", [greedy, lambda logits: draw(logits, generator())], ids=["greedy", "draw"])
def test_nothing_to_choose(choose, bad):
    with pytest.raises(ValueError, match="there is nothing to choose"):
        choose(torch.tensor([[0.0, 1.0], [bad, 0.0]]))
    with pytest.raises(ValueError, match="there is nothing to choose"):
        choose(torch.full((3,), -torch.inf))


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-30])
def test_at_the_smallest_temperatures_the_likeliest_token_is_drawn(temperature):
    logits = torch.tensor([[1.0, 9e3, -2.0], [-torch.inf, -5.0, -5.0]])
    config = SamplingConfig(temperature=temperature)
    expected = torch.tensor([[0, 1, 0], [0, 0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(distribution(logits, config), expected)
    assert sample(logits, config, torch.Generator())[0] == 1
