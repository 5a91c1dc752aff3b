"""The block-diagonal layer against the dense layer with zeros outside its blocks."""

import pytest
import torch

from recurra.layers.feed_forward import BlockDiagonalLinear


@pytest.mark.parametrize("n_heads", [1, 2, 6])
def test_it_is_a_dense_layer_with_zeros(n_heads):
    layer, x = BlockDiagonalLinear(6, n_heads).double(), torch.randn(2, 3, 6, dtype=torch.float64)
    torch.nn.init.normal_(layer.bias)
    dense = torch.block_diag(*layer.weight)
    torch.testing.assert_close(layer(x), x @ dense + layer.bias, rtol=1e-12, atol=1e-13)


def test_outputs_start_with_the_variance_of_the_inputs():
    layer, x = BlockDiagonalLinear(512, 4), torch.randn(1, 200, 512)
    assert layer(x).var().item() == pytest.approx(1, rel=0.1)


def test_heads_divide_the_channels():
    with pytest.raises(ValueError, match="n_heads is 4; expected a divisor of channels = 6"):
        BlockDiagonalLinear(6, 4)
