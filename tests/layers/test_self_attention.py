"""Attention between all steps, and to a memory, against torch's own layer with the same weights."""

import pytest
import torch
from torch import nn

from recurra.layers.attention import SelfAttention
from recurra.video.crvit import _MemoryAttention

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def torch_s_own(layer: SelfAttention) -> nn.MultiheadAttention:
    twin = nn.MultiheadAttention(layer.output_projection.in_features, layer.n_heads, batch_first=True).double()
    twin.load_state_dict(
        {
            "in_proj_weight": layer.queries_keys_values.weight,
            "in_proj_bias": layer.queries_keys_values.bias,
            "out_proj.weight": layer.output_projection.weight,
            "out_proj.bias": layer.output_projection.bias,
        }
    )
    return twin


def draw(kind):
    return kind(15, n_heads=3).double(), torch.randn(4, 7, 15, dtype=torch.float64)


def test_self_attention_is_torch_s():
    layer, x = draw(SelfAttention)
    torch.testing.assert_close(layer(x), torch_s_own(layer)(x, x, x)[0], **CLOSE)


def test_the_memory_is_one_more_key_and_value():
    layer, x = draw(_MemoryAttention)
    memory = torch.randn(4, 15, dtype=torch.float64)
    seen = torch.cat([memory[:, None], x], 1)
    found = layer(x, memory, torch.ones(4, dtype=torch.bool))
    torch.testing.assert_close(found, torch_s_own(layer)(x, seen, seen)[0], **CLOSE)


def test_rows_that_do_not_see_their_memory_are_mixed_without():
    layer, x = draw(_MemoryAttention)
    memory, visible = torch.randn(4, 15, dtype=torch.float64), torch.tensor([True, False, True, False])
    found = layer(x, memory, visible)
    torch.testing.assert_close(found[~visible], SelfAttention.forward(layer, x)[~visible], **CLOSE)
    torch.testing.assert_close(found[visible], layer(x, memory, torch.ones_like(visible))[visible], **CLOSE)


def test_a_hidden_memory_of_zeros_gives_and_gets_no_gradient():
    layer, x = draw(_MemoryAttention)
    memory = torch.zeros(4, 15, dtype=torch.float64, requires_grad=True)
    layer(x, memory, torch.zeros(4, dtype=torch.bool)).square().sum().backward()
    assert not memory.grad.any()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("option", ["attention_dropout", "dropout"])
def test_dropout_is_for_training(option):
    layer = SelfAttention(16, n_heads=2, **{option: 0.5})
    x = torch.randn(2, 5, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
