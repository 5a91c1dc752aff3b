"""The short causal convolution against torch's own, in pieces, and with padding anywhere."""

import pytest
import torch
from torch import nn

from recurra.layers.convolution import ShortConvolution

CHANNELS = 5


def of_torch(layer: ShortConvolution) -> nn.Conv1d:
    """torch's convolution with the same weights; it takes (B, D, L) and what stands before the first step."""
    conv = nn.Conv1d(CHANNELS, CHANNELS, layer.kernel_size, groups=CHANNELS, bias=layer.bias is not None).double()
    conv.load_state_dict(layer.state_dict())
    return conv


@pytest.mark.parametrize(
    ("kernel_size", "bias"), [(4, True), (4, False), (2, True), (1, True), (20, True), (17, False)]
)
@pytest.mark.parametrize("length", [1, 2, 9, 70])
def test_it_is_torchs_convolution_outputs_state_and_gradients(kernel_size, bias, length):
    layer = ShortConvolution(CHANNELS, kernel_size, bias=bias).double()
    x = torch.randn(3, length, CHANNELS, dtype=torch.float64, requires_grad=True)
    state = torch.randn(3, kernel_size - 1, CHANNELS, dtype=torch.float64, requires_grad=True)
    y, last = layer(x, state)
    conv, before = of_torch(layer), torch.cat([state, x], 1)
    expected = conv(before.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(last, before[:, length:])
    weights = torch.randn_like(y), torch.randn_like(last)
    found = torch.autograd.grad((weights[0] * y).sum() + (weights[1] * last).sum(), [x, state, *layer.parameters()])
    total = (weights[0] * expected).sum() + (weights[1] * before[:, length:]).sum()
    for one, other in zip(found, torch.autograd.grad(total, [x, state, *conv.parameters()]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


MASKS = {
    "right": [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0]],
    "left": [[0, 0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]],
    "between": [[1, 0, 1, 0, 0, 1, 1], [0, 1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0]],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_padding_is_passed_over_and_never_read(mask):
    layer, mask = ShortConvolution(CHANNELS).double(), torch.tensor(mask).bool()
    x = torch.randn(3, 7, CHANNELS, dtype=torch.float64)
    state = torch.randn(3, 3, CHANNELS, dtype=torch.float64, requires_grad=True)
    padded = x.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    y, last = layer(padded, state, mask)
    total = y[mask].sin().sum() + last.cos().sum()
    found = torch.autograd.grad(total, [padded, state, *layer.parameters()])
    leaf, wanted = x.clone().requires_grad_(), 0.0
    for row, counts in enumerate(mask):
        alone, left = layer(leaf[row, counts][None], state[row, None])
        torch.testing.assert_close(y[row, counts], alone[0], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(last[row], left[0], rtol=0, atol=0)
        wanted = wanted + alone.sin().sum() + left.cos().sum()
    for one, other in zip(found, torch.autograd.grad(wanted, [leaf, state, *layer.parameters()]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("length", [1, 6])
def test_half_precision_is_computed_in_float32(length):
    layer, x = ShortConvolution(CHANNELS).bfloat16(), torch.randn(2, length, CHANNELS).bfloat16()
    y, state = layer(x)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(y, layer.float()(x.float())[0].bfloat16())


def test_it_starts_like_torchs_convolution():
    weight = ShortConvolution(10_000).weight
    assert weight.shape == (10_000, 1, 4)
    assert weight.abs().max().item() == pytest.approx(0.5, abs=1e-3)  # uniform, up to 1 / sqrt(kernel_size)
    assert weight.std().item() == pytest.approx(0.5 / 3**0.5, rel=0.02)


@pytest.mark.compile
def test_one_graph_serves_every_length():
    layer, state = ShortConvolution(CHANNELS), torch.randn(2, 3, CHANNELS)
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for steps in (2, 9):
        x, mask = torch.randn(2, steps, CHANNELS), torch.rand(2, steps) < 0.6
        for found, expected in zip(compiled(x, state, mask), layer(x, state, mask)):
            torch.testing.assert_close(found, expected)
