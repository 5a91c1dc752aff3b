import numpy as np
import pytest
import torch

from recurra.analysis.plots import gate_magnitudes, mean_gate_magnitudes, save_png

RESET = 5


def shown(axes):
    ticks = [label.get_text() for label in axes.get_yticklabels()]
    return axes.get_ylabel(), ticks, [line.get_xydata().tolist() for line in axes.lines]


def test_it_is_the_lower_half_of_the_figure_with_channels(make_record):
    record = make_record()
    means = torch.stack([magnitude[0].mean(1) for magnitude in record.magnitudes], dim=1)
    whole = gate_magnitudes(record, reset_token=RESET)
    half = mean_gate_magnitudes(means, layers=record.layers, resets=[3, 14])
    for mine, theirs in ((half.axes[0], whole.axes[2]), (half.axes[1], whole.axes[3])):
        assert shown(mine) == shown(theirs)
    np.testing.assert_array_equal(half.axes[0].images[0].get_array(), whole.axes[2].images[0].get_array())
    assert half.axes[0].images[0].get_clim() == (0.0, 1.0)


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
@pytest.mark.parametrize(("n_steps", "n_layers"), [(1, 1), (5, 2), (1024, 12)])
def test_any_size_is_laid_out_without_a_warning(assert_stacked, tmp_path, n_steps, n_layers):
    figure = mean_gate_magnitudes(torch.rand(n_steps, n_layers))
    save_png(figure, tmp_path, "gates")
    assert_stacked(figure.axes[:2])


def test_layers_without_a_number_are_refused():
    with pytest.raises(ValueError, match=r"layers is \[4\]; expected a number for each of the 2 layers"):
        mean_gate_magnitudes(torch.rand(3, 2), layers=[4])
