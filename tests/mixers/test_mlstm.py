"""The mLSTM against its equations without a stabiliser, step by step. tests/convert compares it with xLSTM."""

import pytest
import torch
from tests.mixers.stepwise import first_mixer, require_same
from torch.nn import functional

from recurra.mixers.mlstm import MLSTM, MLSTMState
from recurra.ops.scan.reference import stabilisers

D_MODEL = 8
OPTIONS = [{"n_heads": 2}, {"n_heads": 3, "d_qk": 6, "d_v": 9}, {"n_heads": 1, "d_qk": 1, "d_v": 2}]


def make(**options) -> MLSTM:
    """A layer in float64 whose gates see the input and are of all sizes."""
    layer = MLSTM(D_MODEL, **options).double()
    with torch.no_grad():
        layer.gates.weight.normal_(0, 1)
        layer.gates.bias.normal_(0, 2)
        layer.norm_weight.uniform_(0.5, 1.5)
    return layer


def by_a_loop(layer: MLSTM, x: torch.Tensor, state: MLSTMState):
    """Beck et al. (19)-(27) as they stand: C and n themselves, which float64 can hold. Only the state is scaled."""
    heads, d_qk, d_v = layer.n_heads, layer.d_qk, layer.d_v
    w_q, w_k, w_v, w_o = layer.qkvo.weight.split([d_qk, d_qk, d_v, d_v])
    m = state.m.detach()
    scale = torch.exp(state.m)[:, :, None, None]
    memory, normaliser = (state.h[..., :-1] * scale), (state.h[..., -1:] * scale)
    outputs = []
    for step in x.unbind(1):
        gates = 15 * torch.tanh(functional.linear(step, layer.gates.weight, layer.gates.bias) / 15)
        i, f = torch.exp(gates[:, :heads]), torch.sigmoid(gates[:, heads:])
        m = torch.maximum(f.log() + m, i.log()).detach()
        q, k, v = ((step @ w.T).unflatten(-1, (heads, -1)) for w in (w_q, w_k, w_v))
        memory = f[..., None, None] * memory + i[..., None, None] * k[..., :, None] * v[..., None, :]
        normaliser = f[..., None, None] * normaliser + i[..., None, None] * k[..., :, None]
        q = q[..., None, :] / (d_qk // heads) ** 0.5
        divisor = (q @ normaliser).abs().clamp(min=1) + 1e-6 * torch.exp(m)[..., None, None]
        h = (q @ memory / divisor)[:, :, 0]
        h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()
        h = h.flatten(1) * layer.norm_weight
        outputs.append((torch.sigmoid(step @ w_o.T) * h) @ layer.output_projection.weight.T)
    last = torch.cat([memory, normaliser], -1) * torch.exp(-m)[:, :, None, None]
    return torch.stack(outputs, 1), MLSTMState(last, m)


def any_state(layer: MLSTM, batch: int) -> MLSTMState:
    return MLSTMState(*(torch.randn_like(part) for part in layer.initial_state(batch)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_state_and_gradients_are_the_papers(options):
    layer = make(**options)
    require_same(layer, by_a_loop, torch.randn(2, 11, D_MODEL, dtype=torch.float64), any_state(layer, 2), 1e-9)


def test_stabilisers_are_the_recursion():
    log_f, log_i = -5 * torch.rand(3, 40, 2, dtype=torch.float64), 9 * torch.randn(3, 40, 2, dtype=torch.float64)
    m, expected = torch.randn(3, 2, dtype=torch.float64), []
    start = m
    for f, i in zip(log_f.unbind(1), log_i.unbind(1)):
        m = torch.maximum(f + m, i)
        expected.append(m)
    torch.testing.assert_close(stabilisers(log_f.cumsum(1), log_i, start), torch.stack(expected, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(stabilisers(log_f[:, :1], log_i[:, :1], start)[:, 0], expected[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [1e4, -1e4])
def test_gates_at_their_caps_stay_finite_in_float32(bias):
    """10,000 steps with input gates of exp(15), or forget gates of sigmoid(-15): float32 holds what float64 does."""
    layer, x = MLSTM(4, n_heads=2, d_qk=2), torch.randn(1, 10_000, 4)
    with torch.no_grad():
        layer.gates.bias[:2] = bias
        layer.gates.bias[2:] = -bias
        y, state = layer(x)
        expected, last = layer.double()(x.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(state.m.double(), last.m, rtol=0, atol=0.1)


@pytest.mark.parametrize("in_a_model", [False, True])
def test_it_starts_as_published(in_a_model):
    layer = first_mixer("mlstm", 64) if in_a_model else MLSTM(64)
    assert layer.initial_state(1).h.shape == (1, 8, 4, 9)
    assert layer.gates.weight.eq(0).all()
    assert layer.gates.bias[:8].eq(-10).all()
    torch.testing.assert_close(layer.gates.bias[8:], torch.linspace(3, 6, 8))
    assert layer.norm_weight.eq(1).all()
