"""Griffin's recurrent block against its equations, step by step. tests/convert compares it with RecurrentGemma."""

import pytest
import torch
from tests.mixers.stepwise import require_same
from torch.nn import functional

from recurra.mixers.rg_lru import RGLRU, RGLRUState

D_MODEL = 6
OPTIONS = [{"n_heads": 2}, {"lru_width": 8, "n_heads": 4, "d_conv": 3}, {"lru_width": 3, "d_conv": 1}]


def make(**options) -> RGLRU:
    """A layer in float64 whose gates are far from their start, where all are alike."""
    layer = RGLRU(D_MODEL, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def by_a_loop(layer: RGLRU, x: torch.Tensor, state: RGLRUState):
    """De et al. (1)-(4), with dense gates and the convolution as a sum over the last inputs."""
    w_r, w_i = (torch.block_diag(*gate.weight) for gate in (layer.recurrence_gate, layer.input_gate))
    filters = layer.convolution.weight[:, 0].T
    outputs, h, inputs, started = [], state.h, list(state.convolution.unbind(1)), state.started
    for step in x.unbind(1):
        inputs.append(functional.linear(step, layer.input_projection.weight, layer.input_projection.bias))
        recent = inputs[-len(filters) :]
        u = layer.convolution.bias + sum(w * one for w, one in zip(filters, recent, strict=True))
        r = torch.sigmoid(u @ w_r + layer.recurrence_gate.bias)
        i = torch.sigmoid(u @ w_i + layer.input_gate.bias)
        a = torch.sigmoid(-layer.decay) ** (8 * r)
        h = a * h + torch.where(started == 0, 1.0, (1 - a**2).sqrt()) * i * u
        started = torch.ones_like(started)
        gate = functional.gelu(functional.linear(step, layer.gate.weight, layer.gate.bias), approximate="tanh")
        outputs.append(functional.linear(gate * h, layer.output_projection.weight, layer.output_projection.bias))
    recent = inputs[len(inputs) - len(filters) + 1 :]
    window = torch.stack(recent, 1) if recent else state.convolution
    return torch.stack(outputs, 1), RGLRUState(h, window, started)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_state_and_gradients_are_the_papers(options):
    """In the middle of one stream, and at the start of another."""
    layer = make(**options)
    start = layer.initial_state(2)
    started = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    state = RGLRUState(*(torch.randn_like(part) * started.view(2, *[1] * (part.dim() - 1)) for part in start))
    x = torch.randn(2, 11, D_MODEL, dtype=torch.float64)
    constant = ["started"] if layer.convolution.kernel_size > 1 else ["started", "convolution"]
    require_same(layer, by_a_loop, x, state._replace(started=started), 1e-10, constant)


def test_the_decay_starts_uniform_in_its_range():
    layer = RGLRU(4, lru_width=4000, n_heads=4, r_min=0.5, r_max=0.6)
    a = torch.exp(-8 * functional.softplus(layer.decay.double()))
    assert a.min() > 0.4999
    assert a.max() < 0.6001
    assert a.mean().item() == pytest.approx(0.55, abs=0.003)
    assert a.var().item() == pytest.approx(0.1**2 / 12, rel=0.1)


def test_a_gate_that_rounds_to_1_has_finite_gradients():
    layer, x = RGLRU(D_MODEL), torch.randn(2, 5, D_MODEL)
    with torch.no_grad():
        layer.recurrence_gate.bias.fill_(-200.0)  # sigmoid is 0 in float32, a is 1
    y, state = layer(x)
    gradients = torch.autograd.grad(y.sum() + state.h.sum(), list(layer.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    h = torch.randn(2, D_MODEL)
    _, last = layer(x, state._replace(h=h))
    assert torch.equal(last.h, h)


def test_a_gate_near_1_keeps_the_digits_of_its_complement():
    """1 - a^2 = 1e-9: a rounds to 1 in float32, the factor of the input does not round to 0."""
    layer, x = RGLRU(D_MODEL), torch.randn(1, 1, D_MODEL)
    with torch.no_grad():
        layer.recurrence_gate.weight.zero_()
        layer.decay.fill_(-23.5)
        _, last = layer(x, layer.initial_state(1)._replace(started=torch.ones(1, 1)))
        exact = layer.double()
        state = exact.initial_state(1)._replace(started=torch.ones(1, 1).double())
        expected = by_a_loop(exact, x.double(), state)[1].h.float()
    assert expected.abs().min() > 0
    torch.testing.assert_close(last.h, expected, rtol=1e-4, atol=0)
