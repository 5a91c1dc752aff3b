import csv
import io
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.patches import ConnectionPatch
from matplotlib.text import Text

from recurra.analysis.plots.curves import _smooth, metric_curves
from recurra.analysis.plots.figure import _spread, save_png

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
    figure = metric_curves(runs, panels, logarithmic=["Loss"])
    loss, accuracy = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Loss", "Accuracy"]
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")
    colours = [line.get_color() for line in loss.lines]
    styles = [line.get_linestyle() for line in loss.lines]
    assert colours[0] == colours[2] != colours[1] == colours[3]
    assert styles[0] == styles[1] != styles[2] == styles[3]
    assert [line.get_color() for line in accuracy.lines] == colours[:2]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["train loss", "valid loss"]
    assert accuracy.get_legend() is None
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_of_a_step_that_comes_twice_the_later_counts_and_steps_are_put_in_order():
    table = "step,loss\n10,1.0\n2,9.0\n2,4.0\n"
    assert drawn(metric_curves({"a": rows(table)}, {"Loss": ["loss"]}).axes[0]) == [[[2, 4.0], [10, 1.0]]]


def test_smoothing_keeps_the_measured_points_behind():
    table = "step,loss\n" + "".join(f"{step},{step % 2}\n" for step in range(10))
    (axes,) = metric_curves({"a": rows(table)}, {"Loss": ["loss"]}, smoothing=2).axes
    raw, smoothed = axes.lines
    assert raw.get_ydata().tolist() == [step % 2 for step in range(10)]
    assert raw.get_alpha() < 0.5
    np.testing.assert_allclose(smoothed.get_ydata()[1:-1], [1 / 3, 2 / 3] * 4)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.floats(-1e3, 1e3)), min_size=1, unique_by=lambda pair: pair[0]),
    st.floats(0, 100),
)
def test_smooth_against_a_loop(pairs, width):
    points = torch.tensor(sorted(pairs), dtype=torch.float64).T.contiguous()
    positions, values = _smooth(points, width)
    assert torch.equal(positions, points[0])
    for position, value in zip(positions, values):
        near = (positions >= position - width / 2) & (positions <= position + width / 2)
        assert value == pytest.approx(points[1][near].mean().item(), rel=1e-9, abs=1e-9)


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_one_point_nothing_finite_and_many_runs_can_be_saved(tmp_path):
    runs = {f"run {i}": rows(f"step,loss\n1,{'inf' if i == 3 else i}\n") for i in range(10)}
    figure = metric_curves(runs, {"Loss": ["loss"]})
    assert drawn(figure.axes[0]) == [[[1, i]] if i != 3 else [] for i in range(10)]
    assert [text.get_text() for text in figure.axes[0].texts] == [run for run in runs if run != "run 3"]
    assert save_png(figure, tmp_path, "curves").stat().st_size > 0


def many_runs(n=14):
    names = ["transformer-xl-of-sixteen-layers-n70-8-epochs" if i == 5 else f"run-{i}-n35-8-epochs" for i in range(n)]
    tables = [
        f"step,train_loss,valid_loss,valid_accuracy\n1,3,,\n9,{2 + i / 30},{2 + i % 3 / 50},0.5\n" for i in range(n)
    ]
    return {name: rows(table) for name, table in zip(names, tables)}


@pytest.mark.parametrize("n_runs", [8, 21])
def test_more_runs_than_colours_differ_in_colour_and_dash_and_have_their_names_beside_them(n_runs, assert_inside):
    panels = {"loss (nats per target)": ["train_loss", "valid_loss"], "Accuracy": ["valid_accuracy"]}
    runs = many_runs(n_runs)
    figure = metric_curves(runs, panels, logarithmic=["loss (nats per target)"])
    titles = ["train loss (nats per target)", "valid loss (nats per target)", "Accuracy"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == titles
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "log", "linear"]
    assert_inside(figure)
    for axes in figure.axes:
        lines = axes.lines[:n_runs]
        assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == n_runs
        texts = dict(zip(runs, axes.texts))
        assert [text.get_text() for text in texts.values()] == list(runs)
        assert [text.get_color() for text in texts.values()] == [line.get_color() for line in lines]
        heights = sorted(Text.get_window_extent(text).intervaly.tolist() for text in texts.values())
        assert all(below[1] < above[0] + 1 for below, above in itertools.pairwise(heights))


def test_the_name_of_a_curve_that_ends_early_is_led_to_level_and_crosses_no_other():
    runs = many_runs(8) | {"early": rows("step,train_loss\n1,3\n2,2.9\n")}
    (axes,) = metric_curves(runs, {"Loss": ["train_loss"]}).axes
    leaders = {patch.get_edgecolor()[:3]: patch for patch in axes.get_children() if isinstance(patch, ConnectionPatch)}
    end = axes.lines[len(runs) - 1].get_xydata()[-1]
    (text,) = (text for text in axes.texts if text.get_text() == "early")
    leader = leaders[to_rgb(text.get_color())]
    assert leader.xy1 == (2.0, 2.9) == tuple(end)
    level = axes.transAxes.inverted().transform(axes.transData.transform(end))[1]
    assert leader.xy2 == text.xy == (1.0, pytest.approx(level))


def test_a_legend_of_long_names_is_not_cut(assert_inside):
    runs = {f"{i} a-run-with-a-name-of-sixty-letters-as-nobody-should-give-one": rows() for i in range(7)}
    assert_inside(metric_curves(runs, {"Loss": ["train_loss"]}))
    assert_inside(metric_curves(runs, {"Loss": ["train_loss"], "Accuracy": ["valid_accuracy"]}))


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0, 0.08))
def test_spread_places(places, gap):
    found = _spread(places, gap)
    order = np.argsort(places, kind="stable")
    moved = np.array(found)[order]
    assert (np.diff(moved) >= gap - 1e-9).all()
    assert ((moved > -1e-9) & (moved < 1 + 1e-9)).all()
    if (np.diff(np.array(places)[order]) >= gap).all():
        np.testing.assert_allclose(found, places, atol=1e-9)


@pytest.mark.parametrize(
    ("runs", "panels", "options", "words"),
    [
        ({}, {"L": ["loss"]}, {}, "runs is {}; expected at least one run"),
        ({"a": rows()}, {"L": ["loss"]}, {}, "a column is 'loss'; expected one that some run has.* train_loss"),
        ({"a": rows()}, {"L": ["valid_loss"]}, {"x": "epoch"}, "a column is 'epoch'; expected one"),
    ],
)
def test_bad_curves_are_named(runs, panels, options, words):
    with pytest.raises(ValueError, match=words):
        metric_curves(runs, panels, **options)
