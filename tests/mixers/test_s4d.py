"""S4D against its equations in a plain loop; its initial values, options and errors."""

import cmath
import math

import pytest
import torch
from tests.tracing import compile_by_tracing
from torch.nn import functional

from recurra.layers.state_space import _hippo_normal_modes, inverse_frequencies, linear_frequencies
from recurra.mixers.s4d import S4D

OPTIONS = [{}, {"init": "inv", "discretisation": "bilinear", "d_state": 6}]


def discretise(eigenvalue: complex, step: float, rule: str) -> tuple[complex, complex]:
    if rule == "zoh":
        a = cmath.exp(step * eigenvalue)
        return a, (a - 1) / eigenvalue
    a = (1 + step / 2 * eigenvalue) / (1 - step / 2 * eigenvalue)
    return a, step / (1 - step / 2 * eigenvalue)


def by_the_equations(layer: S4D, x: torch.Tensor, rule: str) -> torch.Tensor:
    """Discretise every mode by itself and step through it in Python's own complex numbers."""
    y = torch.zeros_like(x)
    for d in range(x.shape[2]):
        step = math.exp(layer.log_step[d])
        for n in range(layer.frequency.shape[1]):
            eigenvalue = complex(-math.exp(layer.log_decay[d, n]), layer.frequency[d, n])
            a, b = discretise(eigenvalue, step, rule)
            c = complex(*layer.output_weights[d, n].tolist())
            for row in range(x.shape[0]):
                h = 0j
                for t in range(x.shape[1]):
                    h = a * h + b * float(x[row, t, d])
                    y[row, t, d] += 2 * (c * h).real
    u = functional.gelu(y + x * layer.skip)
    values, gates = (u @ layer.output_projection.weight.T + layer.output_projection.bias).chunk(2, -1)
    return values * torch.sigmoid(gates)


@pytest.mark.parametrize("length", [5, 37])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layer_computes_the_equations(options, length):
    layer = S4D(4, **{"d_state": 8, **options}).double()
    x = torch.randn(2, length, 4, dtype=torch.float64)
    with torch.no_grad():
        expected = by_the_equations(layer, x, options.get("discretisation", "zoh"))
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-11, atol=1e-11)


def test_frequencies_are_the_literatures():
    torch.testing.assert_close(linear_frequencies(8), math.pi * torch.tensor([0.0, 1.0, 2.0, 3.0]))
    torch.testing.assert_close(inverse_frequencies(4), torch.tensor([12.0, 4 / 3]) / math.pi)


def test_inverse_frequencies_are_near_hippos_and_those_in_the_gateloop_paper_are_not():
    hippo = _hippo_normal_modes(64)[0].flip(0)[:8]
    k = torch.arange(8)
    printed = 64 / math.pi * (64 / (k + 1) + 1)
    assert (inverse_frequencies(64)[:8] / hippo - 1).abs().max() < 0.25
    assert (printed[1:] / hippo[1:] - 1).abs().min() > 0.5


@pytest.mark.parametrize("init", ["lin", "inv"])
def test_initial_eigenvalues_and_steps(init):
    layer = S4D(5, d_state=6, init=init, min_step=0.01, max_step=0.1)
    assert layer.log_decay.shape == layer.frequency.shape == (5, 3)
    torch.testing.assert_close(layer.log_decay.exp(), torch.full((5, 3), 0.5))
    expected = {"lin": linear_frequencies, "inv": inverse_frequencies}[init](6)
    torch.testing.assert_close(layer.frequency, expected.expand(5, 3))
    steps = layer.log_step.exp().sort().values
    torch.testing.assert_close(steps, torch.logspace(-2, -1, 5))
    wide = S4D(400, d_state=2)
    assert wide.output_weights.square().sum(-1).mean().item() == pytest.approx(1, abs=0.2)  # |C|^2


@pytest.mark.compile
def test_compile_equals_eager_where_it_convolves():
    layer = S4D(4, d_state=6).double()
    compiled = compile_by_tracing(layer)
    x = torch.randn(2, 40, 4, dtype=torch.float64)

    def run(function):
        layer.zero_grad()
        y, state = function(x)
        y, state = function(x, state)
        (y.square().sum() + state.h.abs().square().sum()).backward()
        return [y, state.h, *(p.grad for p in layer.parameters())]

    for actual, expected in zip(run(compiled), run(layer)):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
