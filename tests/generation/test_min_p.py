import pytest
import torch

from recurra.generation import keep_min_p


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


def test_a_p_of_1_keeps_all_that_are_likeliest():
    assert keep_min_p(torch.tensor([2.0, 1.0, 2.0]), 1.0).tolist() == [2.0, -torch.inf, 2.0]


def test_half_precision_comes_out_as_float32():
    assert keep_min_p(torch.randn(5).bfloat16(), 0.5).dtype == torch.float32


@pytest.mark.parametrize("p", [0.0, -0.1, 1.1, float("nan")])
def test_impossible_p(p):
    with pytest.raises(ValueError, match="p is"):
        keep_min_p(torch.zeros(3), p)
