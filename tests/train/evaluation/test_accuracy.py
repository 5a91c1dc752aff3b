import math

import pytest
import torch

from recurra.data.batches import IGNORED_TARGET, Batch
from recurra.train.evaluate import AroundResets, _accuracy_by_span, scaled_accuracy


def test_counts_and_accuracies_by_hand():
    spans = torch.tensor([[0, 1, 1], [2, 5, 5]])
    correct = torch.tensor([[True, True, False], [False, True, True]])
    result = _accuracy_by_span(correct, spans)
    assert result.edges.tolist() == list(range(7))
    assert result.n_correct.tolist() == [1, 1, 0, 0, 0, 2]
    assert result.counts.tolist() == [1, 2, 1, 0, 0, 2]
    assert result.accuracies[[0, 1, 2, 5]].tolist() == [1.0, 0.5, 0.0, 1.0]
    assert math.isnan(result.accuracies[3])
    assert result.overall == 4 / 6


def test_counts_beyond_float32_stay_exact():
    # 2^24 + 1 is the first whole number that float32 cannot hold.
    n = 2**24 + 1
    result = _accuracy_by_span(torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.uint8))
    assert result.counts.tolist() == result.n_correct.tolist() == [n]
    assert result.overall == 1.0


@pytest.mark.parametrize(
    ("accuracy", "n_classes", "scaled"), [(0.2, 5, 0.0), (1.0, 5, 1.0), (0.75, 2, 0.5), (0.0, 2, -1.0)]
)
def test_scaled_accuracy_is_0_at_chance(accuracy, n_classes, scaled):
    assert scaled_accuracy(accuracy, n_classes) == pytest.approx(scaled, abs=1e-12)


def test_positions_before_the_first_reset_and_from_it_on_are_counted_apart():
    around = AroundResets(reset_token=5)
    inputs = torch.tensor([[1, 2, 5, 3, 5], [5, 1, 1, 1, 1], [1, 2, 3, 4, 0]])
    targets = torch.tensor([[7, 7, 7, 7, 7], [7, 7, 7, 7, IGNORED_TARGET], [7, IGNORED_TARGET, 7, 7, 7]])
    predictions = torch.tensor([[7, 0, 7, 7, 0], [0, 7, 0, 0, IGNORED_TARGET], [7, IGNORED_TARGET, 7, 0, 7]])
    around(Batch(inputs, targets, continues=False), predictions)
    assert around.scores == {"accuracy_before_resets": 4 / 6, "accuracy_after_resets": 3 / 7}
    around(Batch(inputs[:1], targets[:1], continues=False), targets[:1])
    assert around.scores == {"accuracy_before_resets": 6 / 8, "accuracy_after_resets": 6 / 10}
