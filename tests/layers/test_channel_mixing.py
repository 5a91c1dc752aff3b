"""The block-diagonal layer, and the token shift."""

import pytest
import torch

from recurra.layers.convolution import with_previous
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


def test_the_step_before_is_the_counted_one():
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    x = torch.arange(1.0, 17).view(4, 4, 1)
    before = torch.tensor([[-1.0], [-2.0], [-3.0], [-4.0]])
    now, previous, last = with_previous(x.masked_fill(~mask[..., None], torch.nan), before, mask)
    assert torch.equal(now[mask], x[mask])
    assert previous[mask].flatten().tolist() == [-1, 1, 2, 3, -2, 6, -3]
    assert last.flatten().tolist() == [4, 8, 9, -4]


def test_without_a_mask_every_step_counts():
    x, before = torch.randn(2, 5, 3).bfloat16(), torch.randn(2, 3)
    everything = torch.ones(2, 5, dtype=torch.bool)
    for one, other in zip(with_previous(x, before, None), with_previous(x, before, everything)):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)
