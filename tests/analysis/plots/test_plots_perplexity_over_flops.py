import numpy as np
import pytest

from recurra.analysis.plots.scores import CostPoint, perplexity_over_flops

CURVES = {
    "Transformer": [CostPoint(70, 700_000_000, 67.0), CostPoint(17, 136_000_000, 82.5)],
    "CRT-GRU": [CostPoint(35, 385_000_000, 61.0)],
}


def drawn(axes):
    return {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in axes.lines}


def test_a_curve_for_each_kind_in_the_order_of_segment_lengths():
    by_segment, by_token = perplexity_over_flops(CURVES).axes
    assert drawn(by_segment) == {"Transformer": [[0.136, 82.5], [0.7, 67.0]], "CRT-GRU": [[0.385, 61.0]]}
    assert drawn(by_token) == {"Transformer": [[8.0, 82.5], [10.0, 67.0]], "CRT-GRU": [[11.0, 61.0]]}


def test_points_are_marked_with_their_length_in_their_curves_colour():
    by_segment, _ = perplexity_over_flops(CURVES).axes
    marks = {text.get_text(): (text.xy, text.get_color()) for text in by_segment.texts}
    one, other = (line.get_color() for line in by_segment.lines)
    assert one != other
    assert marks == {"17": ((0.136, 82.5), one), "70": ((0.7, 67.0), one), "35": ((0.385, 61.0), other)}


@pytest.mark.parametrize("n_curves", [1, 9, 21])
def test_any_number_of_curves(n_curves):
    figure = perplexity_over_flops({f"model {i}": [CostPoint(10, 10**9 + i, 50.0 + i)] for i in range(n_curves)})
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == n_curves
