"""The linear RNN against the notes' equations; its initial values, options and errors."""

import pytest
import torch
from torch.nn import functional

from recurra.mixers.linear_rnn import LinearRNN, LinearRNNState

TRANSITIONS = ["dense", "diagonal"]


def matrix_of(layer: LinearRNN) -> torch.Tensor:
    if hasattr(layer.recurrence, "matrix"):
        return layer.recurrence.matrix
    return torch.diag(torch.exp(-torch.exp(layer.recurrence.alpha)))


def above(layer: LinearRNN, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """z = f(C h + D x)"""
    c, d = layer.output_projection, layer.skip
    return functional.gelu(h @ c.weight.T + c.bias + x @ d.weight.T)


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_layer_computes_the_recurrence(transition):
    layer = LinearRNN(4, d_state=6, transition=transition).double()
    a, b = matrix_of(layer), layer.input_weights
    x = torch.randn(2, 13, 4, dtype=torch.float64)
    h, states = torch.zeros(2, 6, dtype=torch.float64), []
    for t in range(13):
        h = torch.stack([a @ h[row] + b @ x[row, t] for row in range(2)])
        states.append(h)
    y, state = layer(x)
    torch.testing.assert_close(y, above(layer, torch.stack(states, 1), x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, LinearRNNState(h), rtol=1e-12, atol=1e-12)


def test_dense_starts_stable_and_orthogonal():
    matrix = LinearRNN(4, d_state=7, transition="dense").recurrence.matrix
    torch.testing.assert_close(matrix @ matrix.T, 0.99**2 * torch.eye(7), rtol=0, atol=1e-5)


def test_diagonal_starts_with_memories_of_10_to_1000_steps_and_stays_below_one():
    layer = LinearRNN(4, d_state=5, transition="diagonal")
    a = matrix_of(layer).diagonal().sort().values
    torch.testing.assert_close(-a.log(), torch.logspace(-1, -3, 5), rtol=1e-4, atol=0)
    with torch.no_grad():
        layer.recurrence.alpha.fill_(-5.0)
    assert (matrix_of(layer).diagonal() < 1).all()


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_white_noise_of_the_stationary_scale_makes_states_of_variance_one(transition):
    recurrence = LinearRNN(8, d_state=400, transition=transition).recurrence
    with torch.no_grad():  # from a start of variance one, the variance stays
        h = recurrence(torch.randn(300, 50, 400) * recurrence.stationary_scale(), torch.randn(300, 400))[:, -1]
    torch.testing.assert_close(h.square().mean(0), torch.ones(400), rtol=0, atol=0.45)
    torch.testing.assert_close(h.square().mean(), torch.tensor(1.0), rtol=0.02, atol=0)
