"""Ticks where runs resumed, and the panels that have something to show."""

import numpy as np
import pytest

from recurra.analysis.plots import measured_panels, metric_curves, save_png

ROWS = [{"step": "1", "train_loss": "3.0", "valid_loss": ""}, {"step": "9", "train_loss": "2.0", "valid_loss": "2.5"}]
PANELS = {"Loss": ["train_loss"], "Valid": ["valid_loss"]}


def ticks(axes):
    return [line for line in axes.lines if line.get_marker() == "|"]


def test_ticks_stand_on_the_axis_in_the_runs_colour(tmp_path):
    figure = metric_curves({"a": ROWS, "b": ROWS}, PANELS, marks={"b": [3, 5.5], "a": []})
    for axes in figure.axes:
        (marks,) = ticks(axes)
        assert list(marks.get_xdata()) == [3, 5.5]
        assert marks.get_color() == axes.lines[1].get_color() != axes.lines[0].get_color()
        below = axes.transAxes.inverted().transform(marks.get_transform().transform(marks.get_xydata()))[:, 1]
        np.testing.assert_allclose(below, 0.03, atol=1e-6)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "resumed"]
    save_png(figure, tmp_path, "x")


@pytest.mark.parametrize("marks", [None, {}, {"a": []}])
def test_without_marks_nothing_changes(marks):
    figure = metric_curves({"a": ROWS}, PANELS, marks=marks)
    assert not any(ticks(axes) for axes in figure.axes)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a"]


def test_marks_of_an_unknown_run_are_refused():
    with pytest.raises(ValueError, match=r"marks is {'c': \[1\]}; expected names of runs among \['a'\]"):
        metric_curves({"a": ROWS}, PANELS, marks={"c": [1]})


def test_panels_of_what_no_run_measured_are_left_out():
    assert list(measured_panels({"a": ROWS})) == ["loss (nats per target)"]
    more = [{"step": 1, "valid_accuracy": 0.0, "valid_perplexity": ""}]
    assert list(measured_panels({"a": ROWS, "b": more})) == ["loss (nats per target)", "validation accuracy"]
