"""The sLSTM against its equations without a stabiliser, step by step."""

import pytest
import torch
from tests.mixers.stepwise import first_mixer, require_same

from recurra.mixers.slstm import SLSTM, SLSTMState

D_MODEL = 6


def make(n_heads: int = 2, spread: float = 1.0) -> SLSTM:
    """A layer in float64 whose gates have biases of all sizes."""
    layer = SLSTM(D_MODEL, n_heads=n_heads).double()
    with torch.no_grad():
        layer.input_weights.bias.normal_(0, spread)
        layer.norm_weight.uniform_(0.5, 1.5)
    return layer


def by_a_loop(layer: SLSTM, x: torch.Tensor, state: SLSTMState):
    """Beck et al. (8)-(14) as they stand, with dense matrices R and c and n themselves, which float64 can hold."""
    heads, d_head = layer.n_heads, D_MODEL // layer.n_heads
    blocks = layer.recurrent_weights.view(heads, d_head, 4, d_head)
    r_z, r_i, r_f, r_o = (torch.block_diag(*blocks[:, :, gate]) for gate in range(4))
    (w_z, w_i, w_f, w_o), (b_z, b_i, b_f, b_o) = (p.chunk(4) for p in layer.input_weights.parameters())
    scale, h, outputs = torch.exp(state.m), state.h, []
    c, n, m = state.c * scale, state.n * scale, torch.where(state.n == 0, -torch.inf, state.m).detach()
    for step in x.unbind(1):
        z = torch.tanh(step @ w_z.T + h @ r_z + b_z)
        i = torch.exp(step @ w_i.T + h @ r_i + b_i)
        f = torch.sigmoid(step @ w_f.T + h @ r_f + b_f)
        o = torch.sigmoid(step @ w_o.T + h @ r_o + b_o)
        c, n = f * c + i * z, f * n + i
        h = o * c / n
        m = torch.maximum(f.log() + m, i.log()).detach()
        y = h.unflatten(-1, (heads, -1))
        y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        outputs.append(y.flatten(1) * layer.norm_weight)
    return torch.stack(outputs, 1), SLSTMState(c * torch.exp(-m), n * torch.exp(-m), m, h)


def any_state(batch: int) -> SLSTMState:
    c, n, m, h = torch.randn(4, batch, D_MODEL, dtype=torch.float64)
    return SLSTMState(c, 1 + n.abs(), m, h)


@pytest.mark.parametrize("n_heads", [1, 2, 3])
def test_outputs_state_and_gradients_are_the_papers(n_heads):
    require_same(make(n_heads), by_a_loop, torch.randn(2, 9, D_MODEL, dtype=torch.float64), any_state(2), 1e-10)


@pytest.mark.parametrize("bias", [-1000.0, 1000.0])
def test_the_first_step_writes_whatever_its_input_gate(bias):
    """i / i = 1: exp(-1000) and exp(1000) are 0 and infinite in any precision, and their quotient is not."""
    layer, x = make().float(), torch.randn(2, 1, D_MODEL)
    with torch.no_grad():
        layer.input_weights.bias[D_MODEL : 2 * D_MODEL] = bias
    y, (c, n, m, h) = layer(x)
    z, _, _, o = layer.input_weights(x)[:, 0].chunk(4, -1)
    torch.testing.assert_close(h, torch.sigmoid(o) * torch.tanh(z))
    torch.testing.assert_close(c, torch.tanh(z))
    assert n.eq(1).all()
    torch.testing.assert_close(m, torch.full_like(m, bias), rtol=0, atol=10)
    gradients = torch.autograd.grad(y.sum(), list(layer.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_large_gates_stay_finite_over_many_steps(sign):
    """Input gates of exp(200 +- ...) or forget gates of exp(-200): float32 gives what float64 does."""
    layer, x = make().float(), torch.randn(1, 100, D_MODEL)
    with torch.no_grad():
        layer.input_weights.bias[D_MODEL : 2 * D_MODEL] = sign * 200
        layer.input_weights.bias[2 * D_MODEL : 3 * D_MODEL] = -sign * 200
        y, state = layer(x)
        assert (state.n >= 1).all()
        expected, last = layer.double()(x.double())
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=5e-3)
    torch.testing.assert_close(state.m.double(), last.m, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("in_a_model", [False, True])
def test_forget_gates_start_open(in_a_model):
    layer = first_mixer("slstm", 8, n_heads=2) if in_a_model else SLSTM(8, n_heads=2)
    torch.testing.assert_close(layer.input_weights.bias[16:24], torch.linspace(3, 6, 4).repeat(2))
    assert layer.input_weights.bias[:16].abs().max() < 1
    assert layer.recurrent_weights.abs().max() <= 0.5


def test_autocast_leaves_the_shown_gates_those_of_the_recurrence():
    layer, x, h = SLSTM(D_MODEL, n_heads=2), torch.randn(2, 1, D_MODEL), torch.randn(2, D_MODEL)
    state = layer.initial_state(2)._replace(h=h)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = layer.transition(x, state)
        projected, parts = layer._parts(x, state)
    recurrent = torch.einsum("bhd,hde->bhe", parts.h, layer.recurrent_weights.chunk(4, -1)[2])
    expected = torch.sigmoid(projected[:, 0, 2] + recurrent).flatten(1)
    torch.testing.assert_close(found[:, 0], expected, rtol=0, atol=1e-6)
