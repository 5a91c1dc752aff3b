import numpy as np
import pytest

from recurra.analysis.plots import accuracy_over_length, save_png
from recurra.analysis.plots.lengths import short_number

CURVES = {"gateloop": [(1024, 0.9), (256, 1.0), (2**20, 0.5)], "gru": [(256, 0.7), (1024, 0.2)]}


def test_a_curve_for_each_model_in_the_order_of_lengths():
    (axes,) = accuracy_over_length(CURVES, trained=[256], chance=1 / 17).axes
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in axes.lines}
    assert drawn["gateloop"] == [[256, 1.0], [1024, 0.9], [2**20, 0.5]]
    assert drawn["gru"] == [[256, 0.7], [1024, 0.2]]
    across = [list(line.get_ydata()) for line in axes.lines if list(line.get_xdata()) == [0, 1]]
    assert across == [[1 / 17, 1 / 17]]
    assert [256, 256] in [list(line.get_xdata()) for line in axes.lines]


def test_models_trained_on_several_lengths_have_a_line_for_each():
    (axes,) = accuracy_over_length(CURVES, trained=[256, 512, 256]).axes
    marked = [list(line.get_xdata()) for line in axes.lines if line.get_label() not in CURVES]
    assert marked == [[256, 256], [512, 512]]
    assert {" trained up to 256", " trained up to 512"} <= {text.get_text() for text in axes.texts}


def test_axes_count_tokens_in_doublings_and_accuracy_from_0_to_1():
    figure = accuracy_over_length(CURVES, trained=[256])
    figure.canvas.draw()
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "1k", "1M"]
    low, high = axes.get_ylim()
    assert low <= 0.0 < 1.0 <= high
    assert {text.get_text() for text in axes.texts} >= {"gateloop", "gru"}


def test_short_numbers():
    assert [short_number(n) for n in (0, 64, 1000, 1024, 3 * 2**10, 2**19, 2**20)] == [
        "0", "64", "1000", "1k", "3k", "512k", "1M",
    ]  # fmt: skip


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_it_can_be_saved(tmp_path):
    figure = accuracy_over_length(CURVES, trained=[256], chance=0.06)
    assert save_png(figure, tmp_path, "accuracy-over-length").stat().st_size > 1000


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ({}, "curves is {}; expected at least one curve"),
        ({"a": []}, r"curves\['a'\] is \[\]; expected at least one point"),
        ({"a": [(0, 0.5)]}, r"a point of curves\['a'\] is \(0, 0.5\); expected a length and an accuracy in \[0, 1\]"),
        ({"a": [(4, 1.5)]}, r"a point of curves\['a'\] is \(4, 1.5\)"),
        ({"a": [(4, float("nan"))]}, "accuracy in"),
    ],
)
def test_bad_points_are_named(curves, message):
    with pytest.raises(ValueError, match=message):
        accuracy_over_length(curves, trained=[256])
