"""minGRU and minLSTM against their equations, step by step."""

import pytest
import torch
from tests.mixers.stepwise import require_same
from torch.nn import functional

from recurra.mixers.min_gru import MinGRU
from recurra.mixers.min_lstm import MinLSTM, MinLSTMState

D_MODEL = 5


def gru_parts(layer: MinGRU, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """1 - z, z and the candidate of section 3.1, each from its own weights."""
    (w_z, w_h), (b_z, b_h) = (p.chunk(2) for p in (layer.gate_and_candidate.weight, layer.gate_and_candidate.bias))
    z = torch.sigmoid(functional.linear(x, w_z, b_z))
    return 1 - z, z, functional.linear(x, w_h, b_h)


def lstm_parts(layer: MinLSTM, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """f' and i', the normalised gates of section 3.2.3, and the candidate, each from its own weights."""
    weights, biases = (p.chunk(3) for p in (layer.gates_and_candidate.weight, layer.gates_and_candidate.bias))
    f, i, candidate = (functional.linear(x, w, b) for w, b in zip(weights, biases))
    f, i = torch.sigmoid(f), torch.sigmoid(i)
    return f / (f + i), i / (f + i), candidate


@pytest.mark.parametrize(("kind", "of_step"), [(MinGRU, gru_parts), (MinLSTM, lstm_parts)])
def test_outputs_state_and_gradients_are_the_papers(kind, of_step):
    def by_a_loop(layer, x, state):
        outputs, h = [], state.h
        for step in x.unbind(1):
            forget, write, candidate = of_step(layer, step)
            h = forget * h + write * candidate
            outputs.append(h)
        return torch.stack(outputs, 1), type(state)(h)

    layer = kind(D_MODEL).double()
    state = type(layer.initial_state(1))(torch.randn(3, D_MODEL, dtype=torch.float64))
    require_same(layer, by_a_loop, torch.randn(3, 17, D_MODEL, dtype=torch.float64), state, 1e-12)


def test_equal_gates_take_the_mean_however_small_both_are():
    """f' = i' = 1/2: with gates of exp(-200), whose quotient is 0 / 0 in float32."""
    layer, x = MinLSTM(D_MODEL), torch.randn(1, 1, D_MODEL)
    with torch.no_grad():
        layer.gates_and_candidate.weight[: 2 * D_MODEL] = 0
        layer.gates_and_candidate.bias[: 2 * D_MODEL] = -200.0
    h = torch.randn(1, D_MODEL)
    expected = (h + functional.linear(x[0], *(p[2 * D_MODEL :] for p in layer.gates_and_candidate.parameters()))) / 2
    torch.testing.assert_close(layer(x, MinLSTMState(h))[0][:, 0], expected)
