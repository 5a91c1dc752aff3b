import numpy as np
import pytest
from tools.pages.benchmarks.page import measured_sweeps

from tools.pages.benchmarks import figures


@pytest.fixture
def panels(record, sweep):
    return figures.over_length(sweep, record["limits"]).axes


def _curves(axes) -> dict[str, tuple[list[float], list[float]]]:
    handles, names = axes.get_legend_handles_labels()
    lines = [getattr(handle, "lines", [handle])[0] if hasattr(handle, "lines") else handle for handle in handles]
    return {name: (list(line.get_xdata()), list(line.get_ydata())) for name, line in zip(names, lines)}


def test_time_and_memory_are_those_of_the_record(panels, sweep):
    time, memory = map(_curves, panels)
    assert set(time) == {"floor", 'mode "chunk"', 'mode "scan"', "square"}
    assert time["square"][0] == [2**7, 2**8, 2**9, 2**10]
    np.testing.assert_allclose(time["square"][1], [length**2 * 1e-6 for length in time["square"][0]])
    assert memory["square"][1] == [length**2 / 2**10 for length in (2**7, 2**8, 2**9, 2**10, 2**11)]


def test_memory_that_is_not_resolved_is_not_drawn(record, sweep):
    sweep["memory"]['mode "chunk"']["128"] = 0.05
    memory = _curves(figures.over_length(sweep, record["limits"]).axes[1])
    assert "floor" not in memory
    assert min(memory['mode "chunk"'][0]) == 2**8


def test_both_panels_are_logarithmic_and_span_the_same_lengths(panels):
    for axes in panels:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert axes.get_xlim() == (2**7 / 1.2, 2**12 * 1.2)
        assert axes.xaxis.get_major_formatter()(1024, 0) == "$2^{10}$"


def test_limits_are_drawn_where_they_are(panels):
    time, memory = ([line.get_ydata()[0] for line in axes.lines if len(set(line.get_ydata())) == 1] for axes in panels)
    assert 2.0 in time
    assert 6 * 1024 in memory


def test_nine_ways_look_different(sweep):
    sweep["ways"] = dict.fromkeys(["floor", *"abcdefgh"], "")
    found = [tuple(look.values()) for look in figures.looks(sweep).values()]
    assert len(set(found)) == 9
    assert len({(colour, line) for colour, line, _ in found}) == 9


def test_files_are_the_same_every_time(record, tmp_path):
    for folder in "ab":
        drawing = figures.SweepFigures(record, tmp_path / folder)
        assert drawing.sweep("one") == "![A sweep: time and memory over L](figures/benchmarks-one.png)"
        assert drawing.written == [tmp_path / folder / "benchmarks-one.png"]
    one, other = (tmp_path / folder / "benchmarks-one.png" for folder in "ab")
    assert one.read_bytes() == other.read_bytes()


def test_only_sweeps_with_points_are_drawn(record, sweep):
    record["sweeps"]["empty"] = sweep | {"times": {"128": {}}}
    assert measured_sweeps(record) == {"one": sweep}


def test_nothing_to_draw_is_an_error(record, sweep):
    sweep["times"], sweep["memory"] = {"128": {}}, {"floor": {}}
    with pytest.raises(ValueError, match="which has no points"):
        figures.over_length(sweep, record["limits"])
