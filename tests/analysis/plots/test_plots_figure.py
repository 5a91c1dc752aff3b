import errno
import os
import xml.etree.ElementTree as ElementTree

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure
from tests.small_figures import in_full

from recurra.analysis.plots.figure import _STYLE, house_style, new_figure, save
from recurra.analysis.plots.gates import magnitude_activations


def settings():
    # Reading the backend would make matplotlib choose one.
    return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}


@in_full
def test_save_writes_a_png_and_an_svg(tmp_path):
    paths = save(magnitude_activations(), tmp_path / "new" / "folder", "figure-4.1")
    assert [path.name for path in paths] == ["figure-4.1.png", "figure-4.1.svg"]
    pixels = matplotlib.image.imread(paths[0])
    assert pixels.shape[:2] == (870, 2160)  # 7.2 x 2.9 inches at 300 dots per inch
    assert np.unique(pixels).size > 10
    assert ElementTree.parse(paths[1]).getroot().tag.endswith("svg")


@house_style()
def small() -> Figure:
    """A figure that is drawn quickly, with a line and an area to clip it at."""
    figure = new_figure(1.0, 1.0)
    figure.add_subplot(xticks=[], yticks=[]).plot([0, 1], [0, 2])
    return figure


def test_the_same_figure_gives_the_same_bytes(tmp_path):
    first = [path.read_bytes() for path in save(small(), tmp_path, "first")]
    second = [path.read_bytes() for path in save(small(), tmp_path, "second")]
    assert first == second
    for content in first:
        assert b"dc:date" not in content
        assert b"Software" not in content


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_full_disk_leaves_the_old_figure_and_names_it(tmp_path, monkeypatch, suffix):
    def full(descriptor):
        if f".{suffix}." in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")

    paths = save(small(), tmp_path, "figure")
    before = {path: path.read_bytes() for path in paths}
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '.*figure\.{suffix}'"):
        save(small(), tmp_path, "figure")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a/"])
def test_a_name_is_not_a_path(tmp_path, name):
    with pytest.raises(ValueError, match=f"name is {name!r}; expected a file name without folders"):
        save(new_figure(1.0, 1.0), tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_the_user_s_settings_neither_enter_nor_change(tmp_path):
    with matplotlib.rc_context({"lines.linewidth": 11.0, "svg.hashsalt": "mine", "xtick.direction": "in"}):
        before = settings()
        figure = magnitude_activations()
        strange = [path.read_bytes() for path in save(figure, tmp_path, "strange")]
        assert settings() == before
    plain = [path.read_bytes() for path in save(magnitude_activations(), tmp_path, "plain")]
    assert figure.axes[0].lines[0].get_linewidth() == _STYLE["lines.linewidth"]
    assert strange == plain


def test_the_analysis_loads_no_matplotlib_and_plots_no_pyplot_which_chooses_a_backend(run_python, tmp_path):
    run_python(
        """
        import sys, recurra.analysis
        assert "matplotlib" not in sys.modules, "the analysis alone loads it"
        import recurra.analysis.plots as plots
        plots.save(plots.magnitude_activations(), ".", "figure")
        assert "matplotlib.pyplot" not in sys.modules
        """
    )
    assert (tmp_path / "figure.png").is_file()
