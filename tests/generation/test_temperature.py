import pytest
import torch

from recurra.generation import apply_temperature


def test_the_probabilities_are_raised_to_a_power():
    logits = torch.randn(3, 5, 11, dtype=torch.float64)
    powers = logits.softmax(-1) ** (1 / 0.7)
    torch.testing.assert_close(
        apply_temperature(logits, 0.7).softmax(-1), powers / powers.sum(-1, keepdim=True), rtol=1e-12, atol=0
    )


def test_half_precision_comes_out_as_float32():
    logits = torch.randn(11).bfloat16()
    assert torch.equal(apply_temperature(logits, 0.3), logits.float() / 0.3)


def test_ruled_out_stays_ruled_out():
    assert apply_temperature(torch.tensor([-torch.inf, 1.0]), 2.0).tolist() == [-torch.inf, 0.5]


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_temperatures(temperature):
    with pytest.raises(ValueError, match="temperature is"):
        apply_temperature(torch.zeros(3), temperature)
