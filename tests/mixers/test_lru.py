"""The LRU against its equations in a plain loop; its initial ring, options and errors."""

import cmath
import math

import pytest
import torch

from recurra.mixers.lru import LRU


def by_the_equations(layer: LRU, x: torch.Tensor) -> torch.Tensor:
    """Mode by mode and step by step in Python's own complex numbers."""
    b = torch.view_as_complex(layer.input_weights).tolist()
    c = torch.view_as_complex(layer.output_weights).tolist()
    y = x * layer.skip
    for n in range(len(b)):
        a = cmath.exp(complex(-math.exp(layer.nu[n]), math.exp(layer.theta[n])))
        for row in range(x.shape[0]):
            h = 0j
            for t in range(x.shape[1]):
                drive = sum(weight * value for weight, value in zip(b[n], x[row, t].tolist()))
                h = a * h + math.exp(layer.log_gamma[n]) * drive
                for d in range(x.shape[2]):
                    y[row, t, d] += (c[d][n] * h).real
    return y


@pytest.mark.parametrize("options", [{}, {"d_state": 7, "r_min": 0.5, "r_max": 0.9, "max_phase": 0.3}], ids=str)
def test_layer_computes_the_equations(options):
    layer = LRU(4, **options).double()
    x = torch.randn(2, 13, 4, dtype=torch.float64)
    with torch.no_grad():
        expected = by_the_equations(layer, x)
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-12, atol=1e-12)


def test_it_starts_uniformly_on_the_ring():
    """Uniform by area: |a|^2 and the phase are uniform between their bounds."""
    layer = LRU(2, d_state=20_000, r_min=0.6, r_max=0.8, max_phase=1.5)
    a = layer.eigenvalues().detach()
    area, phase = a.abs().square(), a.angle()
    assert area.min() >= 0.6**2 - 1e-6
    assert area.max() <= 0.8**2 + 1e-6
    assert phase.min() >= 0
    assert phase.max() <= 1.5 + 1e-6
    quarters = torch.tensor([0.25, 0.5, 0.75])
    torch.testing.assert_close(area.quantile(quarters), 0.36 + quarters * 0.28, rtol=0, atol=0.01)
    torch.testing.assert_close(phase.quantile(quarters), quarters * 1.5, rtol=0, atol=0.04)


def test_initial_values_are_finite_on_the_whole_disc():
    layer = LRU(2, d_state=100_000)
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert layer.eigenvalues().abs().max() <= 1
    assert layer.transition(torch.zeros(1, 1, 2))[1].abs().max() > 3  # all around: phases are up to 2 pi


def test_white_noise_makes_states_of_variance_one():
    """|B x|^2 has mean 1, and gamma keeps it: E|h|^2 = 1 for every mode, however long its memory."""
    layer = LRU(8, d_state=150, r_min=0.5, r_max=0.95)
    _, state = layer(torch.randn(300, 60, 8))
    torch.testing.assert_close(state.h.abs().square().mean(), torch.tensor(1.0), rtol=0.1, atol=0)
    by_memory = state.h.abs().square().mean(0)[layer.nu.argsort()]
    torch.testing.assert_close(by_memory[:50].mean(), by_memory[100:].mean(), rtol=0.2, atol=0)


def test_weights_start_with_the_published_spread():
    layer = LRU(50, d_state=80)
    assert layer.input_weights.std().item() == pytest.approx(100**-0.5, rel=0.05)
    assert layer.output_weights.std().item() == pytest.approx(80**-0.5, rel=0.05)
