import matplotlib.image
import numpy as np
import pytest
import torch
from tests.small_figures import in_full

from recurra.analysis.plots.figure import save_png
from recurra.analysis.plots.gates import gate_magnitudes

RESET = 5


def test_heat_maps_show_the_magnitudes_and_the_means(make_record):
    record = make_record()
    figure = gate_magnitudes(record, sequence=1, reset_token=RESET)
    first, second, means = (axes.images[0].get_array() for axes in figure.axes[:3])
    for drawn, magnitude in zip((first, second), record.magnitudes, strict=True):
        assert drawn.shape == (4, 16)
        by_channel = magnitude[1].T[magnitude[1].mean(0).argsort(descending=True)]
        np.testing.assert_array_equal(drawn, by_channel)
    np.testing.assert_allclose(means, torch.stack([m[1].mean(1) for m in record.magnitudes]), rtol=1e-6)
    total = torch.cat([m[1] for m in record.magnitudes], dim=1).mean(1)
    np.testing.assert_allclose(figure.axes[3].lines[-1].get_ydata(), total, rtol=1e-6)


def test_resets_of_the_row_are_marked(make_record):
    figure = gate_magnitudes(make_record(), sequence=0, reset_token=RESET)
    for axes in figure.axes[:3]:
        assert list(axes.lines[0].get_xdata()) == [3, 14]
    assert [line.get_xdata()[0] for line in figure.axes[3].lines[:-1]] == [3, 14]


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
@pytest.mark.parametrize(
    ("n_steps", "channels", "token"),
    [(1, (1,), RESET), (5, (1, 3), None), (5, (1, 3), RESET), (128, (64,) * 4, None), (60, (90,) * 12, RESET)],
)
def test_any_size_is_laid_out_without_a_warning(make_record, assert_stacked, tmp_path, n_steps, channels, token):
    figure = gate_magnitudes(make_record(n_steps, channels), reset_token=token)
    save_png(figure, tmp_path, "gates")
    assert_stacked(figure.axes[: len(channels)])


@in_full
def test_a_gate_that_closes_for_one_step_of_1024_is_seen(make_record, tmp_path):
    record = make_record(1024, (64,) * 4)
    for magnitude in record.magnitudes:
        magnitude.fill_(1.0)
        magnitude[:, 500] = 0.0
    path = save_png(gate_magnitudes(record), tmp_path, "gates")
    darkest = np.array([68, 1, 84]) / 255  # the first colour of viridis
    pixels = matplotlib.image.imread(path)[:, :, :3]
    columns = (np.abs(pixels - darkest).max(axis=2) < 0.02).sum(axis=0)
    assert columns[: columns.size * 3 // 4].max() > 0.6 * pixels.shape[0]
