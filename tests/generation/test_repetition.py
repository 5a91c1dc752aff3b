import pytest
import torch

from recurra.generation import penalise_repetition


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


def test_a_token_counts_once():
    assert penalise_repetition(torch.tensor([4.0, -4.0]), torch.tensor([0, 0, 1, 1, 1]), 2.0).tolist() == [2.0, -8.0]


def test_ruled_out_stays_ruled_out():
    assert penalise_repetition(torch.tensor([-torch.inf, 1.0]), torch.tensor([0]), 0.5).tolist() == [-torch.inf, 1.0]


def test_nothing_recent_changes_nothing():
    logits = torch.randn(5)
    assert torch.equal(penalise_repetition(logits, torch.zeros(0, dtype=torch.int64), 1.5), logits)


@pytest.mark.parametrize("penalty", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_penalties(penalty):
    with pytest.raises(ValueError, match="penalty is"):
        penalise_repetition(torch.zeros(3), torch.tensor([0]), penalty)
