import math

import numpy as np

from recurra.analysis.plots.gates import gate_phases


def test_magnitude_and_phase_keep_one_order_of_channels(make_record):
    record = make_record()
    figure = gate_phases(record, sequence=1)
    for index in range(2):
        order = record.magnitudes[index][1].mean(0).argsort(descending=True)
        left, right = figure.axes[2 * index : 2 * index + 2]
        np.testing.assert_array_equal(left.images[0].get_array(), record.magnitudes[index][1][:, order].T)
        drawn = np.asarray(right.images[0].get_array())
        turns = np.exp(1j * drawn) / np.exp(1j * record.phases[index][1][:, order].T.double().numpy())
        np.testing.assert_allclose(turns, 1.0, atol=1e-5)
        assert np.abs(drawn).max() <= math.pi + 1e-6
        assert right.images[0].get_clim() == (-math.pi, math.pi)
