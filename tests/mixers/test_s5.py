"""S5 against its equations in a plain loop, and against the real model that it starts as."""

import cmath
import math

import pytest
import torch
from torch.nn import functional

from recurra.layers.state_space import _hippo_normal_modes
from recurra.mixers.s5 import S5


def by_the_equations(layer: S5, x: torch.Tensor) -> torch.Tensor:
    """GateLoop (2)-(5), mode by mode and step by step in Python's own complex numbers."""
    n_modes, channels = layer.frequency.shape[0], x.shape[2]
    b_bar = torch.view_as_complex(layer.input_weights).tolist()
    c = torch.view_as_complex(layer.output_weights).tolist()
    y = torch.zeros_like(x)
    for n in range(n_modes):
        eigenvalue = complex(-math.exp(layer.log_decay[n]), layer.frequency[n])
        a = cmath.exp(math.exp(layer.log_step[n]) * eigenvalue)
        for row in range(x.shape[0]):
            h = 0j
            for t in range(x.shape[1]):
                drive = sum(b_bar[n][d] * float(x[row, t, d]) for d in range(channels))
                h = a * h + (a - 1) / eigenvalue * drive
                for d in range(channels):
                    y[row, t, d] += 2 * (c[d][n] * h).real
    u = functional.gelu(y + x * layer.skip)
    return u * torch.sigmoid(u @ layer.gate.weight.T + layer.gate.bias)


def test_layer_computes_the_equations():
    layer = S5(4, d_state=6).double()
    x = torch.randn(2, 13, 4, dtype=torch.float64)
    with torch.no_grad():
        expected = by_the_equations(layer, x)
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-11, atol=1e-11)


def real_model(layer: S5) -> tuple[torch.Tensor, torch.Tensor]:
    """B and C in the coordinates of HiPPO-N: V times the kept modes and their conjugates."""
    vectors = _hippo_normal_modes(2 * layer.frequency.shape[0])[1]
    b = vectors @ torch.view_as_complex(layer.input_weights.detach().double())
    c = torch.view_as_complex(layer.output_weights.detach().double()) @ vectors.mH
    return 2 * b.real, 2 * c.real


def test_it_starts_as_a_real_model_with_the_hippo_n_matrix():
    """In those coordinates, and with one step size, it is the zero-order hold of HiPPO-N by a matrix exponential."""
    n, d, step = 6, 4, 0.05
    layer = S5(d, d_state=n, min_step=step, max_step=step).double()
    with torch.no_grad():
        layer.frequency.copy_(_hippo_normal_modes(n)[0])  # without the rounding to float32
        layer.log_decay.fill_(math.log(0.5))
        layer.log_step.fill_(math.log(step))
    p = (torch.arange(n, dtype=torch.float64) + 0.5).sqrt()
    legs = -2 * torch.outer(p, p).tril(-1) - torch.diag(torch.arange(n) + 1.0)
    b, c = real_model(layer)
    augmented = torch.zeros(n + d, n + d, dtype=torch.float64)
    augmented[:n, :n] = legs + torch.outer(p, p)
    augmented[:n, n:] = b
    exponential = torch.linalg.matrix_exp(augmented * step)
    x = torch.randn(1, 9, d, dtype=torch.float64)
    h, outputs = torch.zeros(n, dtype=torch.float64), []
    for t in range(9):
        h = exponential[:n, :n] @ h + exponential[:n, n:] @ x[0, t]
        outputs.append(c @ h)
    u = functional.gelu(torch.stack(outputs)[None] + x * layer.skip)
    torch.testing.assert_close(layer(x)[0], u * torch.sigmoid(layer.gate(u)), rtol=1e-11, atol=1e-11)


def test_initial_values():
    layer = S5(300, d_state=40, min_step=0.01, max_step=0.1)
    b, c = real_model(layer)
    assert b.std().item() == pytest.approx(300**-0.5, rel=0.05)
    assert c.std().item() == pytest.approx(40**-0.5, rel=0.05)
    assert layer.skip.std().item() == pytest.approx(1, rel=0.2)
    torch.testing.assert_close(layer.log_decay.exp(), torch.full((20,), 0.5))
    torch.testing.assert_close(layer.log_step.exp().sort().values, torch.logspace(-2, -1, 20))


@pytest.mark.parametrize("discretisation", ["zoh", "bilinear"])
def test_the_bare_model_in_both_discretisations_with_clipped_eigenvalues(discretisation):
    layer = S5(3, d_state=4, discretisation=discretisation, clip_eigs=True, gated=False).double()
    assert layer.gate is None
    with torch.no_grad():
        layer.log_decay.copy_(torch.tensor([math.log(1e-7), math.log(0.3)]))
    x = torch.randn(1, 7, 3, dtype=torch.float64)
    eigenvalues = [
        complex(-max(math.exp(d), 1e-4), f) for d, f in zip(layer.log_decay.tolist(), layer.frequency.tolist())
    ]
    expected = x * layer.skip
    for n, eigenvalue in enumerate(eigenvalues):
        z = math.exp(layer.log_step[n].item()) * eigenvalue
        a = cmath.exp(z) if discretisation == "zoh" else (2 + z) / (2 - z)
        factor = (a - 1) / eigenvalue  # holds for both rules
        b, c = (torch.view_as_complex(w.detach()) for w in (layer.input_weights, layer.output_weights))
        h = 0j
        for t in range(7):
            h = a * h + factor * (b[n] @ x[0, t].to(b.dtype)).item()
            expected[0, t] += 2 * (c[:, n] * h).real
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-12, atol=1e-12)


def test_blocks_start_as_equal_hippo_n_matrices():
    """In the real coordinates the state matrix is block-diagonal, and B and C are real draws."""
    layer = S5(200, d_state=12, blocks=3)
    frequency, of_block = _hippo_normal_modes(4)
    torch.testing.assert_close(layer.frequency, frequency.float().repeat(3))
    vectors = torch.block_diag(*[of_block] * 3)
    b = 2 * (vectors @ torch.view_as_complex(layer.input_weights.detach().double())).real
    kept = torch.view_as_complex(layer.input_weights.detach().double())
    torch.testing.assert_close(vectors.mH @ b.to(vectors.dtype), kept, rtol=1e-6, atol=1e-6)
    assert b.std().item() == pytest.approx(200**-0.5, rel=0.1)
    p = (torch.arange(4, dtype=torch.float64) + 0.5).sqrt()
    legs = -2 * torch.outer(p, p).tril(-1) - torch.diag(torch.arange(4) + 1.0) + torch.outer(p, p)
    state_matrix = torch.block_diag(legs, legs, legs).to(vectors.dtype)
    frequencies = frequency.repeat(3)
    torch.testing.assert_close(state_matrix @ vectors, vectors * (-0.5 + 1j * frequencies), rtol=1e-12, atol=1e-12)
