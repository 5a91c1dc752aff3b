import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurra.analysis.plots.figure import save_png
from recurra.analysis.plots.scores import _pooled, accuracy_over_span
from recurra.data.memory_horizon import SpanAccuracy
from recurra.train.evaluate import _accuracy_by_span


def counted(n_correct, counts):
    return SpanAccuracy(torch.tensor(n_correct), torch.tensor(counts))


def outline(area) -> list[tuple[float, float]]:
    """The corners of the steps from left to right, each once."""
    return list(dict.fromkeys((float(x), float(y)) for x, y in area.get_paths()[0].vertices if y > 0))


def test_each_run_is_a_line_over_the_spans_and_its_positions_are_steps():
    runs = {"long": counted([20, 20, 0], [20, 40, 80]), "short": counted([30, 10], [40, 40])}
    upper, lower = accuracy_over_span(runs).axes
    assert [line.get_label() for line in upper.lines] == ["long (overall 0.29)", "short (overall 0.50)"]
    np.testing.assert_array_equal(upper.lines[0].get_xydata(), [[0, 1.0], [1, 0.5], [2, 0.0]])
    steps = [outline(area) for area in lower.collections]
    assert steps[0] == [(-0.5, 20), (0.5, 20), (0.5, 40), (1.5, 40), (1.5, 80), (2.5, 80)]
    assert steps[1] == [(-0.5, 40), (0.5, 40), (1.5, 40)]


def test_a_curve_ends_where_it_rests_on_fewer_than_20_positions():
    run = counted([9, 30, 5, 1, 1, 1], [10, 60, 10, 10, 9, 1])
    upper, lower = accuracy_over_span({"run": run}).axes
    np.testing.assert_array_equal(upper.lines[0].get_xydata(), [[0, 0.9], [1, 0.5]])
    assert outline(lower.collections[0])[-2:] == [(4.5, 1), (5.5, 1)]  # all positions are shown
    upper, _ = accuracy_over_span({"run": run}, smoothing=3).axes
    assert upper.lines[0].get_xdata().tolist() == [0, 1, 2, 3, 4]
    upper, _ = accuracy_over_span({"run": counted([1], [2])}).axes
    assert len(upper.lines[0].get_xdata()) == 0


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30),
    st.integers(0, 20).map(lambda half: 2 * half + 1),
)
def test_pooling_against_a_loop(bins, window):
    n_correct = [min(pair) for pair in bins]
    counts = [max(pair) for pair in bins]
    right, total = _pooled(counted(n_correct, counts), window)
    pooled = (right / total).tolist()
    for middle, value in enumerate(pooled):
        near = slice(max(0, middle - window // 2), middle + window // 2 + 1)
        total = sum(counts[near])
        assert value == sum(n_correct[near]) / total if total else np.isnan(value)


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
@pytest.mark.parametrize("n_runs", [1, 9])
def test_any_number_of_runs(tmp_path, n_runs):
    torch.manual_seed(0)
    spans = torch.randint(0, 50, (400,))
    runs = {f"run {i}": _accuracy_by_span(torch.rand(400) < 0.5, spans) for i in range(n_runs)}
    figure = accuracy_over_span(runs, smoothing=5, chance=0.02)
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == n_runs + 1
    save_png(figure, tmp_path, "spans")
