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
    penalise_repetition,
    sample,
)


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_default_draws_by_the_models_own_probabilities():
    logits = torch.randn(40, 17)
    assert torch.equal(sample(logits, SamplingConfig(), generator()), draw(logits, generator()))


def test_the_settings_apply_in_their_order():
    logits, recent = torch.randn(300, 17) * 3, torch.randint(17, (300, 9))
    config = SamplingConfig(repetition_penalty=1.7, repetition_window=4, temperature=1.5, top_k=9, top_p=0.8, min_p=0.1)
    by_hand = penalise_repetition(logits, recent[:, 5:], 1.7)
    by_hand = keep_min_p(keep_top_p(keep_top_k(apply_temperature(by_hand, 1.5), 9), 0.8), 0.1)
    assert torch.equal(sample(logits, config, generator(), recent), draw(by_hand, generator()))


def test_every_setting_matters():
    logits, recent = torch.randn(300, 17) * 3, torch.randint(17, (300, 9))
    plain = sample(logits, SamplingConfig(), generator(), recent)
    for setting in (
        {"repetition_penalty": 3.0},
        {"temperature": 0.3},
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.5},
    ):
        assert not torch.equal(sample(logits, SamplingConfig(**setting), generator(), recent), plain), setting


def test_a_window_beyond_the_recent_tokens_takes_them_all():
    logits, recent = torch.randn(50, 7), torch.randint(7, (50, 3))
    chosen = sample(logits, SamplingConfig(repetition_penalty=4.0, temperature=0.0), generator(), recent)
    assert torch.equal(chosen, greedy(penalise_repetition(logits, recent, 4.0)))


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


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.5])
def test_tokens_that_were_there_are_divided_or_multiplied(penalty):
    logits = torch.randn(2, 3, 7, dtype=torch.float64)
    recent = torch.randint(7, (2, 3, 4))
    expected = logits.clone()
    for row, tokens in zip(expected.view(6, 7), recent.view(6, 4)):
        for token in set(tokens.tolist()):
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    before = logits.clone()
    torch.testing.assert_close(penalise_repetition(logits, recent, penalty), expected, rtol=1e-15, atol=0)
    assert torch.equal(logits, before)


# --- temperature ---


def test_a_temperature_raises_probabilities_to_a_power():
    logits = torch.randn(3, 5, 11, dtype=torch.float64)
    powers = logits.softmax(-1) ** (1 / 0.7)
    torch.testing.assert_close(
        apply_temperature(logits, 0.7).softmax(-1), powers / powers.sum(-1, keepdim=True), rtol=1e-12, atol=0
    )


# --- top-k ---


def top_k_by_hand(row: list[float], k: int) -> list[float]:
    kept = sorted(row, reverse=True)[:k]
    return [value if value >= kept[-1] else -math.inf for value in row]


@pytest.mark.parametrize("k", [1, 2, 7, 13, 50])
def test_the_k_largest_stay(k):
    logits = torch.randn(4, 3, 13)
    kept = keep_top_k(logits, k)
    assert kept.flatten(0, 1).tolist() == [top_k_by_hand(row, k) for row in logits.flatten(0, 1).tolist()]
    assert (kept > -torch.inf).sum(-1).eq(min(k, 13)).all()


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


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_the_fewest_that_hold_p_stay(p):
    logits = torch.randn(2, 20, 37, dtype=torch.float64) * 2
    kept = keep_top_p(logits, p)
    assert (kept > -torch.inf).flatten(0, 1).tolist() == [
        top_p_by_hand(row, p) for row in logits.flatten(0, 1).tolist()
    ]
    assert torch.equal(kept[kept > -torch.inf], logits[kept > -torch.inf])


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


@pytest.mark.parametrize("p", [1e-6, 0.05, 0.5, 1.0])
def test_what_is_less_than_p_times_as_likely_goes(p):
    logits = torch.randn(4, 3, 29, dtype=torch.float64) * 3
    probabilities = logits.softmax(-1)
    for row, out, chances in zip(
        logits.flatten(0, 1), keep_min_p(logits, p).flatten(0, 1), probabilities.flatten(0, 1)
    ):
        best = max(chances.tolist())
        expected = [
            value if chance >= p * best * (1 - 1e-12) else -torch.inf for value, chance in zip(row.tolist(), chances)
        ]
        assert out.tolist() == expected


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (lambda value: penalise_repetition(torch.zeros(3), torch.tensor([0]), value), (0.0, -1.0, math.nan, math.inf)),
        (lambda value: apply_temperature(torch.zeros(3), value), (0.0, -1.0, math.nan, math.inf)),
        (lambda value: keep_top_k(torch.zeros(3), value), (0, -3)),
        (lambda value: keep_top_p(torch.zeros(3), value), (0.0, -0.1, 1.1, math.nan)),
        (lambda value: keep_min_p(torch.zeros(3), value), (0.0, 1.5, math.nan)),
    ],
    ids=["penalty", "temperature", "k", "top-p", "min-p"],
)
def test_impossible_values(call, wrong):
    for value in wrong:
        with pytest.raises(ValueError, match=r"(penalty|temperature|k|p) is "):
            call(value)


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
