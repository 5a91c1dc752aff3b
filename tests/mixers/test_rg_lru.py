"""Griffin's recurrent block against its equations, step by step, and against transformers' RecurrentGemma."""

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


def test_it_starts_from_zeros_and_takes_the_first_input_whole():
    layer, x = make(n_heads=2), torch.randn(2, 6, D_MODEL, dtype=torch.float64)
    start = layer.initial_state(2)
    assert all(part.eq(0).all() for part in start)
    torch.testing.assert_close(layer(x)[0], by_a_loop(layer, x, start)[0], rtol=1e-11, atol=1e-12)
    u, _ = layer.convolution(layer.input_projection(x[:, :1]))
    _, state = layer(x[:, :1])
    torch.testing.assert_close(state.h, (torch.sigmoid(layer.input_gate(u)) * u)[:, 0], rtol=1e-12, atol=1e-13)
    assert state.started.eq(1).all()


def test_it_is_transformers_block():
    """With the weights copied: what is converted gives the published outputs, the first step included."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    from transformers.models.recurrent_gemma.configuration_recurrent_gemma import RecurrentGemmaConfig
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

    layer = make(lru_width=8, n_heads=2)
    sizes = {"hidden_size": D_MODEL, "lru_width": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    block = RecurrentGemmaRecurrentBlock(RecurrentGemmaConfig(**sizes), 0).double()
    weights = {"rg_lru.recurrent_param": layer.decay}
    for theirs, gate in (("input_gate", layer.input_gate), ("recurrent_gate", layer.recurrence_gate)):
        weights |= {f"rg_lru.{theirs}_weight": gate.weight, f"rg_lru.{theirs}_bias": gate.bias.view(2, 4)}
    parts = {"linear_y": layer.gate, "linear_x": layer.input_projection, "linear_out": layer.output_projection}
    for theirs, module in {**parts, "conv_1d": layer.convolution}.items():
        weights |= {f"{theirs}.weight": module.weight, f"{theirs}.bias": module.bias}
    block.load_state_dict(weights)
    x = torch.randn(2, 13, D_MODEL, dtype=torch.float64)
    expected, _ = block(x, torch.arange(13)[None], None, use_cache=False)
    torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=2e-6)  # their scan is in float32


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


def test_sizes_are_the_published():
    layer = RGLRU(512)
    assert layer.recurrence_gate.weight.shape == (2, 256, 256)
    assert {name: tuple(part.shape) for name, part in layer.initial_state(1)._asdict().items()} == {
        "h": (1, 512),
        "convolution": (1, 3, 512),
        "started": (1, 1),
    }
