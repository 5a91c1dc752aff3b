"""Negative log-likelihoods from logits."""

import math

import pytest
import torch

from recurra.models.shell import negative_log_likelihood


def test_one_target_at_a_time():
    logits, targets = torch.randn(2, 3, 4, dtype=torch.float64), torch.randint(4, (2, 3))
    found = negative_log_likelihood(logits, targets)
    for row in range(2):
        for step in range(3):
            scores = logits[row, step].tolist()
            share = math.exp(scores[int(targets[row, step])]) / sum(math.exp(score) for score in scores)
            assert found[row, step].item() == pytest.approx(-math.log(share), rel=1e-12)


def test_ignored_targets_give_0():
    logits, targets = torch.randn(2, 3, 4), torch.tensor([[0, -100, 1], [-100, -100, 3]])
    found = negative_log_likelihood(logits, targets)
    assert found[targets == -100].tolist() == [0.0] * 3
    assert (found[targets >= 0] > 0).all()


@pytest.mark.parametrize("wrong", [-1, 4])
def test_targets_outside_the_vocabulary_are_refused(wrong):
    with pytest.raises(IndexError, match=f"targets is a tensor with the id {wrong}"):
        negative_log_likelihood(torch.randn(1, 2, 4), torch.tensor([[0, wrong]]))
