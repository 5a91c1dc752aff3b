import numpy as np
import pytest

from recurra.analysis.plots.gates import magnitude_activations


@pytest.fixture
def lines():
    """Positions and values by label, for each of the two panels."""
    figure = magnitude_activations()
    return [
        {line.get_label(): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in axes.lines}
        for axes in figure.axes
    ]


def test_the_curves_are_the_functions(lines):
    alpha, sigmoid = lines[0]["sigmoid"]
    np.testing.assert_allclose(sigmoid, 1 / (1 + np.exp(-alpha)), rtol=1e-12)
    alpha, stable = lines[0]["stable exponential,\ncentred"]
    np.testing.assert_allclose(stable, 2.0 ** -np.exp(alpha), rtol=1e-12)
    mirrored_alpha, mirrored = lines[0]["its mirror image"]
    np.testing.assert_allclose(mirrored, 2.0 ** -np.exp(-mirrored_alpha), rtol=1e-9)
    assert alpha.min() == -6
    assert alpha.max() == 6


@pytest.mark.parametrize(
    ("curve", "speed"), [("sigmoid", "sigmoid"), ("stable exponential,\ncentred", "stable exponential")]
)
def test_the_speeds_are_the_slopes_of_the_curves(lines, curve, speed):
    alpha, values = lines[0][curve]
    slopes = np.abs(np.gradient(values, alpha))
    magnitudes, speeds = lines[1][speed]
    inner = (values > 0.02) & (values < 0.98)  # near 0 the curve bends more than its points can follow
    np.testing.assert_allclose(np.interp(values, magnitudes, speeds)[inner], slopes[inner], atol=1e-4)
