"""Gradients by distance: the lines, bounds beyond float64, the borders of segments."""

import numpy as np
import pytest
import torch

from recurra.analysis.gradient_flow import GradientFlow, StepGradients
from recurra.analysis.plots.figure import COLOURS, GREY, save_png
from recurra.analysis.plots.gradient_flow import gradient_over_distance


def make(n: int = 3, segments: int = 3, at: tuple[int, ...] = (0, -1), step_bound: float = 9.0) -> GradientFlow:
    """A flow that falls by a tenth a token, and bounds that grow as 9^distance."""
    sources = torch.arange(n * (segments - 1))
    targets = torch.tensor([position % n for position in at]) + len(sources)
    distances = (targets[:, None] - sources).double()
    ones = torch.ones(len(sources), dtype=torch.float64)
    return GradientFlow(
        segment_length=n,
        sources=sources,
        targets=targets,
        total=2 * 0.9**distances,
        direct=0.9**distances,
        log10_bound=distances * np.log10(step_bound),
        log10_bound_of_largest=distances,
        log10_bound_a_priori=distances + 1,
        log10_bound_measured=distances * np.log10(1.1),
        memory_norms=torch.ones(len(targets), dtype=torch.float64),
        steps=StepGradients(ones, ones, ones, ones, 1.0, 3.0),
        orthogonality_error=None,
    )


def curves(axes) -> list:
    """Its lines without the borders."""
    return [line for line in axes.lines if len(line.get_xdata()) > 2]


def borders(axes) -> list[tuple[float, str]]:
    return [(line.get_xdata()[0], line.get_color()) for line in axes.lines if len(line.get_xdata()) == 2]


def test_a_column_for_each_target_and_a_colour_for_each_run():
    runs = {"GRU": make(), "NCGRU": make(step_bound=2.0)}
    figure = gradient_over_distance(runs)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["to output 1 of 3", "to output 3 of 3", "", ""]
    for column in range(2):
        upper, lower = figure.axes[column], figure.axes[2 + column]
        assert upper.get_yscale() == "log"
        for (run, colour), above, below in zip(
            zip(runs.values(), COLOURS), np.split(np.array(curves(upper)), 2), np.split(np.array(curves(lower)), 2)
        ):
            distances = run.targets[column] - run.sources
            expected = [run.total[column], run.direct[column]]
            for line, values in zip(above, expected, strict=True):
                np.testing.assert_array_equal(line.get_xydata(), np.stack([distances, values], 1))
                assert line.get_color() == colour
            logarithms = [values.log10() for values in expected]
            logarithms += [run.log10_bound_measured[column], run.log10_bound[column]]
            for line, values in zip(below, logarithms, strict=True):
                np.testing.assert_allclose(line.get_xydata(), np.stack([distances, values], 1), rtol=1e-12)
                assert line.get_color() == colour
            looks = {(line.get_linestyle(), line.get_linewidth()) for line in below}
            assert len(looks) == 4
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:2] == ["GRU", "NCGRU"]
    assert labels[2:] == [
        "measured, all paths",
        "measured, along the RNN",
        "bound from measured steps",
        "bound, CRT (2)",
    ]


def test_borders_of_segments_lie_between_tokens():
    """k = 6 is the first output of the third segment: 5, in the second one, is at 1, and 2, in the first, at 4."""
    figure = gradient_over_distance({"one": make(), "other": make()})
    for axes, expected in zip(figure.axes, ([3.5, 0.5], [5.5, 2.5]) * 2):
        assert borders(axes) == [(place, GREY) for place in expected]


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
@pytest.mark.parametrize(("n_runs", "at"), [(1, (0,)), (8, (0, 1, -1))])
def test_any_number_of_runs_and_targets(tmp_path, n_runs, at):
    runs = {f"run {i}": make(at=at, n=4) for i in range(n_runs)}
    figure = gradient_over_distance(runs)
    assert save_png(figure, tmp_path, "flow").stat().st_size > 0
    assert [len(curves(axes)) for axes in figure.axes] == [2 * n_runs] * len(at) + [4 * n_runs] * len(at)
    assert len({line.get_color() for line in curves(figure.axes[0])}) == min(n_runs, len(COLOURS))
