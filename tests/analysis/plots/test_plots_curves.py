import csv
import io

import numpy as np
import pytest

from recurra.analysis.plots.curves import measured_panels, metric_curves
from recurra.analysis.plots.figure import save_png

TABLE = """step,train_loss,valid_loss,valid_accuracy
1,3.0,,
2,2.5,2.75,0.1
3,nan,,
4,1.5,1.75,0.4
"""


def rows(table=TABLE):
    return list(csv.DictReader(io.StringIO(table)))


def drawn(axes):
    return [np.asarray(line.get_xydata()).tolist() for line in axes.lines]


def test_empty_cells_are_no_points_and_nan_is_not_drawn():
    figure = metric_curves({"a": rows()}, {"Loss": ["train_loss", "valid_loss"]})
    train, valid = drawn(figure.axes[0])
    assert train == [[1, 3.0], [2, 2.5], [4, 1.5]]
    assert valid == [[2, 2.75], [4, 1.75]]


def test_a_panel_per_entry_a_colour_per_run_a_line_style_per_column():
    runs = {"a": rows(), "b": rows(TABLE.replace("3.0", "9.0"))}
    panels = {"Loss": ["train_loss", "valid_loss"], "Accuracy": ["valid_accuracy"]}
    figure = metric_curves(runs, panels)
    loss, accuracy = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Loss", "Accuracy"]
    colours = [line.get_color() for line in loss.lines]
    styles = [line.get_linestyle() for line in loss.lines]
    assert colours[0] == colours[2] != colours[1] == colours[3]
    assert styles[0] == styles[1] != styles[2] == styles[3]
    assert [line.get_color() for line in accuracy.lines] == colours[:2]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["train loss", "valid loss"]
    assert accuracy.get_legend() is None
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_one_point_nothing_finite_and_many_runs_can_be_saved(tmp_path):
    runs = {f"run {i}": rows(f"step,loss\n1,{'inf' if i == 3 else i}\n") for i in range(10)}
    figure = metric_curves(runs, {"Loss": ["loss"]})
    assert drawn(figure.axes[0]) == [[[1, i]] if i != 3 else [] for i in range(10)]
    assert save_png(figure, tmp_path, "curves").stat().st_size > 0


def many_runs(n=14):
    names = ["transformer-xl-of-sixteen-layers-n70-8-epochs" if i == 5 else f"run-{i}-n35-8-epochs" for i in range(n)]
    tables = [
        f"step,train_loss,valid_loss,valid_accuracy\n1,3,,\n9,{2 + i / 30},{2 + i % 3 / 50},0.5\n" for i in range(n)
    ]
    return {name: rows(table) for name, table in zip(names, tables)}


@pytest.mark.parametrize("n_runs", [8, 21])
def test_more_runs_than_colours_differ_in_colour_and_dash(n_runs, assert_inside):
    panels = {"loss (nats per target)": ["train_loss", "valid_loss"], "Accuracy": ["valid_accuracy"]}
    runs = many_runs(n_runs)
    figure = metric_curves(runs, panels)
    titles = ["train loss (nats per target)", "valid loss (nats per target)", "Accuracy"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == titles
    assert_inside(figure)
    for axes in figure.axes:
        assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == n_runs
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(runs)


def test_a_legend_of_long_names_is_not_cut(assert_inside):
    runs = {f"{i} a-run-with-a-name-of-sixty-letters-as-nobody-should-give-one": rows() for i in range(7)}
    assert_inside(metric_curves(runs, {"Loss": ["train_loss"]}))
    assert_inside(metric_curves(runs, {"Loss": ["train_loss"], "Accuracy": ["valid_accuracy"]}))


def test_panels_of_what_no_run_measured_are_left_out():
    records = [{"step": "1", "train_loss": "3.0", "valid_loss": ""}, {"step": "9", "train_loss": "2.0"}]
    assert list(measured_panels({"a": records})) == ["loss (nats per target)"]
    more = [{"step": 1, "valid_accuracy": 0.0, "valid_perplexity": ""}]
    assert list(measured_panels({"a": records, "b": more})) == ["loss (nats per target)", "validation accuracy"]


@pytest.mark.parametrize(
    ("runs", "panels", "words"),
    [
        ({}, {"L": ["loss"]}, "runs is {}; expected at least one run"),
        ({"a": rows()}, {"L": ["loss"]}, "a column is 'loss'; expected one that some run has.* train_loss"),
    ],
)
def test_bad_curves_are_named(runs, panels, words):
    with pytest.raises(ValueError, match=words):
        metric_curves(runs, panels)
