import math

import pytest
import torch

from recurra.generation import keep_top_k


def by_hand(row: list[float], k: int) -> list[float]:
    kept = sorted(row, reverse=True)[:k]
    return [value if value >= kept[-1] else -math.inf for value in row]


@pytest.mark.parametrize("k", [1, 2, 7, 13, 50])
def test_the_k_largest_stay(k):
    logits = torch.randn(4, 3, 13)
    kept = keep_top_k(logits, k)
    assert kept.flatten(0, 1).tolist() == [by_hand(row, k) for row in logits.flatten(0, 1).tolist()]
    assert (kept > -torch.inf).sum(-1).eq(min(k, 13)).all()


def test_ties_with_the_last_stay_whatever_their_order():
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 2.0])
    for order in (torch.arange(6), torch.arange(5, -1, -1), torch.randperm(6)):
        kept = keep_top_k(logits[order], 2) > -torch.inf
        assert sorted(order[kept].tolist()) == [1, 2, 3, 5]


def test_half_precision_comes_out_as_float32():
    assert keep_top_k(torch.randn(5).half(), 2).dtype == torch.float32


def test_fewer_possible_tokens_than_k():
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf])
    assert torch.equal(keep_top_k(logits, 2), logits)


@pytest.mark.parametrize("k", [0, -3])
def test_impossible_k(k):
    with pytest.raises(ValueError, match=f"k is {k}"):
        keep_top_k(torch.zeros(3), k)
