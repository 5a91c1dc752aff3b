"""The settings together, and beside those of the transformers library."""

import pytest
import torch

from recurra.generation import (
    SamplingConfig,
    apply_temperature,
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


def test_temperature_0_is_greedy():
    logits = torch.randn(5, 4, 9)
    assert torch.equal(sample(logits, SamplingConfig(temperature=0.0), generator()), logits.argmax(-1))


def test_whatever_the_settings_the_likeliest_can_be_drawn():
    logits = torch.randn(20, 13)
    narrow = SamplingConfig(top_k=1, top_p=1e-6, min_p=1.0)
    assert torch.equal(sample(logits, narrow, generator()), logits.argmax(-1))


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
        ({"repetition_window": 0}, "repetition_window is 0; expected from 1 to 64"),
        ({"repetition_window": 65}, "repetition_window is 65"),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 3}, "top_k, top_p would have no effect"),
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
