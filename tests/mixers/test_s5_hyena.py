"""S5-Hyena against its equations, step by step."""

import pytest
import torch
from tests.gradients import require_same_gradients
from torch.nn import functional

from recurra.layers.state_space import _hippo_normal_modes
from recurra.mixers.s5_hyena import S5Hyena, S5HyenaState

D_MODEL = 4


def activated(layer: S5Hyena, u: torch.Tensor) -> torch.Tensor:
    """The activations that the authors' configurations name: gelu and half_glu2."""
    if layer.activation == "half-glu":
        return u / (1 + torch.exp(-functional.gelu(u) @ layer.gate.weight.T - layer.gate.bias))
    return functional.gelu(u) if layer.activation == "gelu" else u


def by_a_loop(layer: S5Hyena, x: torch.Tensor, state: S5HyenaState, least_decay: float):
    """Outputs, and the modes after the last step."""
    taps, bias = layer.short_convolution.weight[:, 0], layer.short_convolution.bias
    seen = [*state.inputs.unbind(1), *(x @ layer.input_projection.weight.T + layer.input_projection.bias).unbind(1)]
    decay = layer.log_decay.exp().clamp(min=least_decay)
    eigenvalues = torch.complex(-decay, layer.frequency)
    a = torch.exp(layer.log_step.exp() * eigenvalues)
    b = torch.view_as_complex(layer.input_weights) * ((a - 1) / eigenvalues)[:, None]
    c, h, n_taps = torch.view_as_complex(layer.output_weights), state.h, taps.shape[1]
    outputs = []
    for t in range(x.shape[1]):
        gate, key, value = (bias + sum(taps[:, i] * seen[t + i] for i in range(n_taps))).split(D_MODEL, -1)
        h = a * h + (key * value).to(b.dtype) @ b.T
        u = (2 if layer.paired else 1) * (h @ c.T).real + layer.skip * key * value
        outputs.append(gate * activated(layer, u))
    return layer.output_projection(torch.stack(outputs, 1)), h


OF_BOTH = {
    *("skip", "input_projection.weight", "input_projection.bias", "output_projection.weight", "output_projection.bias"),
    *("short_convolution.weight", "short_convolution.bias"),
}
OPTIONS = [
    {},
    {"kernel_size": 1, "activation": "none"},
    {"d_state": 6, "kernel_size": 5},
    {"d_state": 8, "blocks": 2, "clip_eigs": True, "paired": False},  # WikiText-103
    {"d_state": 8, "blocks": 4, "clip_eigs": True, "activation": "half-glu"},  # recall
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_state_and_gradients_are_those_of_the_loop(options):
    layer = S5Hyena(D_MODEL, **{"d_state": 4, **options}).double()
    with torch.no_grad():
        layer.log_decay[0] = -12  # beyond the clip
    x = torch.randn(2, 13, D_MODEL, dtype=torch.float64, requires_grad=True)
    start = layer.initial_state(2)
    start = S5HyenaState(*(torch.randn_like(tensor).requires_grad_() for tensor in start))
    y, state = layer(x, start)
    expected = by_a_loop(layer, x, start, 1e-4 if options.get("clip_eigs") else 0.0)
    require_same_gradients((y, state.h), expected, [x, *start, *layer.parameters()], 1e-11)


def test_unpaired_modes_start_as_the_pairs_do():
    """The same real model, with every mode kept: its state is twice as large and its first output the same."""
    layers, (first, second) = [], _hippo_normal_modes(4)[0].tolist()
    for paired in (True, False):
        torch.manual_seed(3)
        layers.append(S5Hyena(D_MODEL, d_state=8, blocks=2, paired=paired, min_step=0.1, max_step=0.1).double())
    layers[1].load_state_dict({k: v for k, v in layers[0].state_dict().items() if k in OF_BOTH}, strict=False)
    assert [layer.initial_state(1).h.shape[1] for layer in layers] == [4, 8]
    for layer, frequency in zip(layers, ([first, second], [-second, -first, first, second])):
        assert layer.frequency.tolist() == pytest.approx(2 * frequency)  # of both blocks
    x = torch.randn(2, 9, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(layers[0](x)[0], layers[1](x)[0], rtol=1e-5, atol=1e-6)
