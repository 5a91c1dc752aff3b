"""minGRU and minLSTM against their equations, step by step and in their limits."""

import pytest
import torch
from tests.mixers.stepwise import require_same
from torch.nn import functional

from recurra.mixers.min_gru import MinGRU, MinGRUState
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


@pytest.mark.parametrize(("bias", "is_open"), [(60.0, True), (-60.0, False)])
def test_an_open_gate_writes_the_candidate_and_a_closed_one_keeps_the_state(bias, is_open):
    layer, x = MinGRU(D_MODEL).double(), torch.randn(2, 4, D_MODEL, dtype=torch.float64)
    h = torch.randn(2, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        layer.gate_and_candidate.bias[:D_MODEL] = bias
    expected = gru_parts(layer, x)[2] if is_open else h[:, None].expand(2, 4, D_MODEL)
    torch.testing.assert_close(layer(x, MinGRUState(h))[0], expected, rtol=1e-9, atol=1e-9)


def test_equal_gates_take_the_mean_however_small_both_are():
    """f' = i' = 1/2: with gates of exp(-200), whose quotient is 0 / 0 in float32."""
    layer, x = MinLSTM(D_MODEL), torch.randn(1, 1, D_MODEL)
    with torch.no_grad():
        layer.gates_and_candidate.weight[: 2 * D_MODEL] = 0
        layer.gates_and_candidate.bias[: 2 * D_MODEL] = -200.0
    h = torch.randn(1, D_MODEL)
    expected = (h + functional.linear(x[0], *(p[2 * D_MODEL :] for p in layer.gates_and_candidate.parameters()))) / 2
    torch.testing.assert_close(layer(x, MinLSTMState(h))[0][:, 0], expected)


@pytest.mark.parametrize(("forget", "write"), [(60.0, -60.0), (-60.0, 60.0)])
def test_gates_in_their_limits_keep_the_state_or_write_the_candidate(forget, write):
    layer, x = MinLSTM(D_MODEL).double(), torch.randn(2, 4, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        layer.gates_and_candidate.bias[:D_MODEL] = forget
        layer.gates_and_candidate.bias[D_MODEL : 2 * D_MODEL] = write
    h = torch.randn(2, D_MODEL, dtype=torch.float64)
    expected = h[:, None].expand(2, 4, D_MODEL) if forget > 0 else lstm_parts(layer, x)[2]
    torch.testing.assert_close(layer(x, MinLSTMState(h))[0], expected, rtol=1e-12, atol=1e-13)


def test_both_gates_matter():
    """Unlike minGRU's one gate: a large forget gate beside a large input gate halves the state."""
    layer, x = MinLSTM(D_MODEL).double(), torch.zeros(1, 1, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        layer.gates_and_candidate.bias.copy_(torch.tensor([40.0, 40.0, 0.0]).repeat_interleave(D_MODEL))
    h = torch.randn(1, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(layer(x, MinLSTMState(h))[1].h, h / 2, rtol=1e-12, atol=1e-13)
