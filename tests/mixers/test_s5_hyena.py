"""S5-Hyena against its equations, step by step."""

import pytest
import torch

from recurra.mixers.s5_hyena import S5Hyena, S5HyenaState

D_MODEL = 4


def by_a_loop(layer: S5Hyena, x: torch.Tensor, state: S5HyenaState) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and the modes after the last step."""
    taps, bias = layer.short_convolution.weight[:, 0], layer.short_convolution.bias
    seen = [*state.inputs.unbind(1), *(x @ layer.input_projection.weight.T + layer.input_projection.bias).unbind(1)]
    eigenvalues = torch.complex(-layer.log_decay.exp(), layer.frequency)
    a = torch.exp(layer.log_step.exp() * eigenvalues)
    b = torch.view_as_complex(layer.input_weights) * ((a - 1) / eigenvalues)[:, None]
    c, h, n_taps = torch.view_as_complex(layer.output_weights), state.h, taps.shape[1]
    outputs = []
    for t in range(x.shape[1]):
        gate, key, value = (bias + sum(taps[:, i] * seen[t + i] for i in range(n_taps))).split(D_MODEL, -1)
        h = a * h + (key * value).to(b.dtype) @ b.T
        outputs.append(gate * (2 * (h @ c.T).real + layer.skip * key * value))
    return layer.output_projection(torch.stack(outputs, 1)), h


@pytest.mark.parametrize("options", [{}, {"kernel_size": 1}, {"d_state": 6, "kernel_size": 5}], ids=str)
def test_outputs_state_and_gradients_are_those_of_the_loop(options):
    layer = S5Hyena(D_MODEL, **{"d_state": 4, **options}).double()
    x = torch.randn(2, 13, D_MODEL, dtype=torch.float64, requires_grad=True)
    start = layer.initial_state(2)
    start = S5HyenaState(*(torch.randn_like(tensor).requires_grad_() for tensor in start))
    y, state = layer(x, start)
    expected, h = by_a_loop(layer, x, start)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(state.h, h, rtol=1e-11, atol=1e-12)
    weights, leaves = torch.randn_like(y), [x, *start, *layer.parameters()]
    all_of_them = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad((weights * y).sum() + state.h.abs().square().sum(), leaves, **all_of_them)
    wanted = torch.autograd.grad((weights * expected).sum() + h.abs().square().sum(), leaves, **all_of_them)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
