"""Negative log-likelihoods from logits."""

import math

import pytest
import torch
from torch import nn

from recurra.models.likelihood import PlainLikelihood, negative_log_likelihood


class Counter(PlainLikelihood):
    """Logits from the token and the number of tokens before it."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))

    def forward(self, tokens, state=None):
        first = 0 if state is None else state
        steps = first + torch.arange(tokens.shape[1])
        return self.scores[tokens] * steps[:, None], first + tokens.shape[1]


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


def test_losses_are_float32_for_half_precision():
    assert negative_log_likelihood(torch.randn(1, 2, 3).bfloat16(), torch.zeros(1, 2, dtype=torch.int64)).dtype == (
        torch.float32
    )


@pytest.mark.parametrize("wrong", [-1, 4])
def test_targets_outside_the_vocabulary_are_refused(wrong):
    with pytest.raises(IndexError, match=f"targets is a tensor with the id {wrong}"):
        negative_log_likelihood(torch.randn(1, 2, 4), torch.tensor([[0, wrong]]))


def test_no_steps():
    assert negative_log_likelihood(torch.randn(2, 0, 4), torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)


def test_the_mixin_carries_the_state():
    model, tokens, targets = Counter(), torch.randint(5, (2, 7)), torch.randint(5, (2, 7))
    whole, last = model.loss(tokens, targets)
    torch.testing.assert_close(whole, negative_log_likelihood(model(tokens)[0], targets))
    first, state = model.loss(tokens[:, :3], targets[:, :3])
    second, state = model.loss(tokens[:, 3:], targets[:, 3:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    assert state == last == 7
