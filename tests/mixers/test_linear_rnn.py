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


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_layer_is_the_notes_convolution(transition):
    """h_t = sum_k A^k B c_{t-k}: the kernel [B, AB, A^2 B, ...] slides over the sequence."""
    layer = LinearRNN(3, d_state=5, transition=transition).double()
    a, kernel = matrix_of(layer), [layer.input_weights]
    x = torch.randn(2, 10, 3, dtype=torch.float64)
    for _ in range(9):
        kernel.append(a @ kernel[-1])
    h = torch.stack([sum(x[:, t - k] @ kernel[k].T for k in range(t + 1)) for t in range(10)], 1)
    torch.testing.assert_close(layer(x)[0], above(layer, h, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_a_carried_state_continues_with_all_gradients(transition):
    layer = LinearRNN(4, d_state=6, transition=transition).double()
    x = torch.randn(2, 21, 4, dtype=torch.float64)
    whole, last = layer(x)
    first, state = layer(x[:, :8])
    second, end = layer(x[:, 8:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(end, last, rtol=1e-12, atol=1e-12)
    parameters = list(layer.parameters())
    gradients = [torch.autograd.grad(y.square().sum(), parameters) for y in (torch.cat([first, second], 1), whole)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


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


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_input_weights_start_at_the_stationary_scale(transition):
    layer = LinearRNN(2000, d_state=6, transition=transition)
    rows = layer.input_weights.detach().std(1) * 2000**0.5  # what B makes of an input of variance one
    torch.testing.assert_close(rows, layer.recurrence.stationary_scale(), rtol=0.08, atol=0)


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_transition_parameters_are_those_of_the_recurrence(transition):
    layer = LinearRNN(4, d_state=6, transition=transition)
    assert layer.transition_parameters() == set(layer.recurrence.parameters())
    assert len(layer.transition_parameters()) == 1
    assert not hasattr(layer, "transition")  # it has no gates to record


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_a_bfloat16_layer_recurs_in_float32(transition):
    layer = LinearRNN(3, transition=transition).bfloat16()
    x = torch.randn(2, 20, 3).bfloat16()
    y, state = layer(x)
    assert (y.dtype, state.h.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y.float(), layer.float()(x.float())[0], rtol=0.1, atol=0.1)


def test_a_state_of_another_batch_is_refused():
    _, state = LinearRNN(3, d_state=5)(torch.randn(2, 6, 3))
    assert state.h.shape == (2, 5)
    with pytest.raises(ValueError, match=r"state\.h is float32 \(2, 5\) on cpu; expected float32 \(4, 5\)"):
        LinearRNN(3, d_state=5)(torch.randn(4, 6, 3), state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transition": "full"}, "transition is 'full'; expected one of diagonal, dense"),
        ({"d_state": 0}, "d_state is 0; expected at least 1"),
        ({"d_model": 0}, "d_model is 0; expected at least 1"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LinearRNN(**{"d_model": 4, **options})
