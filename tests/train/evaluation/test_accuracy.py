import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurra.data.batches import IGNORED_TARGET, Batch
from recurra.train.evaluate import AroundResets, _accuracy_by_span, scaled_accuracy


def test_counts_and_accuracies_by_hand():
    spans = torch.tensor([[0, 1, 1], [2, 5, 5]])
    correct = torch.tensor([[True, True, False], [False, True, True]])
    result = _accuracy_by_span(correct, spans, edges=[0, 1, 2, 4, 5, 6])
    assert result.edges.tolist() == [0, 1, 2, 4, 5, 6]
    assert result.n_correct.tolist() == [1, 1, 0, 0, 2]
    assert result.counts.tolist() == [1, 2, 1, 0, 2]
    assert result.accuracies[[0, 1, 2, 4]].tolist() == [1.0, 0.5, 0.0, 1.0]
    assert math.isnan(result.accuracies[3])
    assert result.overall == 4 / 6


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=200))
def test_without_edges_every_span_is_its_own_bin(positions):
    spans = torch.tensor([span for span, _ in positions], dtype=torch.int64)
    correct = torch.tensor([right for _, right in positions], dtype=torch.bool)
    result = _accuracy_by_span(correct, spans)
    n_bins = max(spans.tolist(), default=0) + 1
    counts, n_correct = Counter(spans.tolist()), Counter(span for span, right in positions if right)
    assert result.edges.tolist() == list(range(n_bins + 1))
    assert result.counts.tolist() == [counts[span] for span in range(n_bins)]
    assert result.n_correct.tolist() == [n_correct[span] for span in range(n_bins)]


@given(
    st.lists(st.tuples(st.integers(3, 20), st.booleans()), min_size=1, max_size=100),
    st.sets(st.integers(4, 20)),
)
def test_edges_are_closed_below_and_open_above(positions, inner):
    edges = sorted({3, 21} | inner)
    spans = torch.tensor([span for span, _ in positions])
    correct = torch.tensor([right for _, right in positions])
    result = _accuracy_by_span(correct, spans, edges=edges)
    for bin_, (low, high) in enumerate(pairwise(edges)):
        inside = [right for span, right in positions if low <= span < high]
        assert result.counts[bin_] == len(inside)
        assert result.n_correct[bin_] == sum(inside)
    assert result.overall == sum(right for _, right in positions) / len(positions)


def test_counts_beyond_float32_stay_exact():
    # 2^24 + 1 is the first whole number that float32 cannot hold.
    n = 2**24 + 1
    result = _accuracy_by_span(torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.uint8))
    assert result.counts.tolist() == result.n_correct.tolist() == [n]
    assert result.overall == 1.0


def test_no_positions_at_all():
    nothing = torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64)
    result = _accuracy_by_span(*nothing, edges=[2, 4])
    assert result.counts.tolist() == [0]
    assert math.isnan(result.overall)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_whole_number_type(dtype):
    result = _accuracy_by_span(torch.tensor([True, False]), torch.tensor([1, 1], dtype=dtype))
    assert result.counts.tolist() == [0, 2]
    assert result.counts.dtype == result.edges.dtype == torch.int64
    assert result.accuracies.dtype == torch.float64


RIGHT, SPANS = torch.tensor([True, False]), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("correct", "spans", "edges", "error", "words"),
    [
        (torch.tensor([1, 0]), SPANS, None, TypeError, r"correct is int64 \(2,\) on cpu; expected a bool tensor"),
        (RIGHT, torch.tensor([1.0, 2.0]), None, TypeError, r"spans is float32 \(2,\) on cpu; expected a tensor of int"),
        (RIGHT, RIGHT, None, TypeError, r"spans is bool \(2,\) on cpu; expected a tensor of integers"),
        (RIGHT, torch.tensor([[1, 2]]), None, ValueError, r"spans is int64 \(1, 2\).*expected the shape of correct"),
        (RIGHT, torch.tensor([1, -2]), None, ValueError, r"spans\.min\(\) is -2; expected at least 0"),
        (RIGHT, SPANS, [1, 2], ValueError, r"edges is \[1, 2\]; expected edges that cover the spans 1 to 2"),
        (RIGHT, SPANS, [2, 3], ValueError, r"edges is \[2, 3\]; expected edges that cover the spans 1 to 2"),
        (RIGHT, SPANS, [0, 2, 2, 3], ValueError, r"edges is \[0, 2, 2, 3\]; expected increasing integers"),
        (RIGHT, SPANS, [3], ValueError, r"edges is \[3\]; expected a flat list of two or more"),
    ],
)
def test_bad_input_is_named(correct, spans, edges, error, words):
    with pytest.raises(error, match=words):
        _accuracy_by_span(correct, spans, edges=edges)


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


def test_a_part_without_positions_has_no_score():
    around = AroundResets(reset_token=5)
    assert around.scores == {}
    tokens = torch.tensor([[1, 2]])
    around(Batch(tokens, tokens, continues=False), tokens)
    assert around.scores == {"accuracy_before_resets": 1.0}
