"""The gated short convolution against its formula, step by step. tests/convert has LFM2's."""

import pytest
import torch
from tests.gradients import require_same_gradients

from recurra.mixers.base import create_mixer


@pytest.mark.parametrize(("kernel_size", "biases"), [(1, True), (3, False), (4, True)])
def test_it_is_the_formula_and_so_are_its_gradients(kernel_size, biases):
    torch.manual_seed(0)
    layer = create_mixer("short-conv", 5, kernel_size=kernel_size, biases=biases).double()
    assert (layer.convolution.bias is not None) is biases
    x = torch.randn(2, 9, 5, dtype=torch.float64, requires_grad=True)
    b, c, u = layer.input_projection(x).chunk(3, -1)
    products, rows = b * u, []
    for t in range(x.shape[1]):
        row = torch.zeros(2, 5, dtype=torch.float64) + (layer.convolution.bias if biases else 0)
        for k in range(min(kernel_size, t + 1)):
            row = row + layer.convolution.weight[:, 0, kernel_size - 1 - k] * products[:, t - k]
        rows.append(layer.output_projection(c[:, t] * row))
    expected = torch.stack(rows, 1)
    found, state = layer(x)
    assert torch.equal(state.inputs, products[:, x.shape[1] - kernel_size + 1 :])
    require_same_gradients(found, expected, [x, *layer.parameters()], 1e-12)
