"""GateLoop with a fixed transition and neither input nor output gate is S4D's, S5's and LRU's recurrence (10)."""

import pytest
import torch

from recurra import gate_loop
from recurra.layers.state_space import run_channels
from recurra.mixers.linear_rnn import LinearRNN
from recurra.mixers.lru import LRU
from recurra.mixers.s4d import S4D
from recurra.mixers.s5 import S5

LENGTH = 45
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
MODES = ["recurrent", "scan", "attention"]


def ungated(v, a, mode):
    """y_n = sum_m v_m a^(n-m) (10) by GateLoop: q = k = 1, the same a at every step; v is (B, L, channels)."""
    one = torch.ones(*v.shape, 1, dtype=torch.float64)
    y, last = gate_loop(one, one, v[..., None], a.expand(v.shape)[..., None], mode=mode)
    return y[..., 0], last[..., 0, 0]


def draw(channels=3):
    return torch.randn(2, LENGTH, channels, dtype=torch.float64)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("discretisation", ["zoh", "bilinear"])
def test_s4d_is_gateloop_with_a_fixed_transition(discretisation, mode):
    ssm, x = S4D(3, d_state=8, discretisation=discretisation).double().ssm(), draw()
    a, b, c = (part.detach().flatten() for part in ssm)
    y, last = ungated(x.repeat_interleave(4, -1) * b, a, mode)
    y = (y * c).real.unflatten(-1, (3, 4)).sum(-1)
    expected, state = run_channels(x, ssm)
    torch.testing.assert_close(y, expected, **CLOSE)
    torch.testing.assert_close(last.unflatten(-1, (3, 4)), state, **CLOSE)


@pytest.mark.parametrize("mode", MODES)
def test_lru_is_gateloop_with_a_fixed_transition(mode):
    layer, x = LRU(3, d_state=5).double(), draw()
    b, c = (torch.view_as_complex(weights) for weights in (layer.input_weights, layer.output_weights))
    y, last = ungated(x.to(b.dtype) @ b.T * layer.log_gamma.exp(), layer.eigenvalues(), mode)
    actual, state = layer(x)
    torch.testing.assert_close((y @ c.T).real + layer.skip * x, actual, **CLOSE)
    torch.testing.assert_close(last, state.h, **CLOSE)


@pytest.mark.parametrize("mode", MODES)
def test_s5_is_gateloop_with_a_fixed_transition(mode):
    layer, x = S5(3, d_state=8).double(), draw()
    a, factor = layer.discretised()
    b, c = (torch.view_as_complex(weights) for weights in (layer.input_weights, layer.output_weights))
    y, last = ungated(x.to(b.dtype) @ b.T * factor, a, mode)
    u = torch.nn.functional.gelu(2 * (y @ c.T).real + layer.skip * x)
    actual, state = layer(x)
    torch.testing.assert_close(u * torch.sigmoid(layer.gate(u)), actual, **CLOSE)
    torch.testing.assert_close(last, state.h, **CLOSE)


@pytest.mark.parametrize("mode", MODES)
def test_a_diagonal_linear_rnn_is_gateloop_with_a_real_fixed_transition(mode):
    layer, x = LinearRNN(3, d_state=5, transition="diagonal").double(), draw()
    h, last = ungated(x @ layer.input_weights.T, torch.exp(-torch.exp(layer.recurrence.alpha)), mode)
    actual, state = layer(x)
    torch.testing.assert_close(torch.nn.functional.gelu(layer.output_projection(h) + layer.skip(x)), actual, **CLOSE)
    torch.testing.assert_close(last, state.h, **CLOSE)
