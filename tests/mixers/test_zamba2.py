"""Zamba2's hybrid layer: the equation of its docstring, and what the layers of a model share."""

import pytest
import torch
from torch.nn import functional

from recurra.decoding.packing import pack_linear_layers
from recurra.mixers.mamba2 import Mamba2
from recurra.mixers.rotary_attention import RotaryAttention
from recurra.mixers.zamba2 import Zamba2
from recurra.models.language_model import LanguageModel, LanguageModelConfig

SIZES = {
    "d_state": 5,
    "d_inner": 18,
    "n_mamba_heads": 2,
    "n_heads": 3,
    "d_hidden": 7,
    "rank": 2,
    "adapts_attention": True,
}


def product(adapted):
    """The matrix of a layer with adapters."""
    added = [second.weight @ first.weight for first, second in adapted.adapters]
    return adapted.linear.weight + torch.cat(added)


def normed(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + norm.epsilon).sqrt() * norm.weight


@pytest.mark.parametrize("layer", [None, 2])
def test_it_is_the_equation(layer):
    torch.manual_seed(0)
    module = Zamba2(12, **SIZES, window=None, layer=layer).double()
    x = torch.randn(2, 9, 12 + module.d_carried, dtype=torch.float64)
    attention = RotaryAttention(24, n_heads=3, window=None, query_scale=2**0.5).double()
    attention.qkv.weight.data = product(module.attention.qkv)
    attention.output_projection = module.attention.output_projection
    mamba = Mamba2(12, d_state=5, d_inner=18, n_heads=2).double()
    mamba.load_state_dict(module.mamba.state_dict())
    stream, embedded = x[..., :12], x[..., -12:]
    seen, _ = attention.mix(
        normed(torch.cat([stream, embedded], -1), module.norm_attention), attention.initial_state(2), None
    )
    gate, up = (normed(seen, module.norm_feed_forward) @ product(module.gate_up).T).chunk(2, -1)
    added = functional.gelu(gate) * up @ module.down.weight.T @ module.projection.weight.T
    expected, _ = mamba(normed(stream + added, module.norm_mamba))
    y, _ = module(x)
    torch.testing.assert_close(y[..., :12], expected, rtol=1e-10, atol=1e-11)
    assert torch.equal(y[..., 12:], x[..., 12:])


@pytest.fixture
def model():
    torch.manual_seed(0)
    mixers = ["zamba2", "mamba2", "zamba2", "zamba2", "zamba2"]
    options = {"zamba2": {**SIZES, "n_shared": 2}, "mamba2": {"d_state": 5}}
    return LanguageModel(LanguageModelConfig(11, None, 5, 12, 0, mixers, options)).eval()


def test_every_second_layer_of_a_model_shares_its_matrices(model):
    first, _, second, third, fourth = (block.mixer for block in model.blocks)
    for name, shared in (("down", True), ("norm_attention", True), ("norm_feed_forward", True), ("projection", False)):
        assert (getattr(first, name) is getattr(third, name)) == shared
        assert (getattr(second, name) is getattr(fourth, name)) == shared
        assert getattr(first, name) is not getattr(second, name)
    for layers in (lambda x: x.attention.qkv, lambda x: x.gate_up):
        assert layers(first).linear is layers(third).linear
        assert layers(first).adapters[0] is not layers(third).adapters[0]
    assert first.attention.output_projection is third.attention.output_projection
    packed, _, _, again, _ = (block.mixer for block in pack_linear_layers(model, "int8").blocks)
    assert packed.down is again.down
    assert packed.gate_up.linear is again.gate_up.linear


def test_hybrid_layers_read_the_stream_and_the_embedded_tokens(model):
    given, tokens = [], torch.randint(11, (2, 5))
    for block in model.blocks:
        block.mixer.register_forward_hook(lambda _, inputs, __: given.append(inputs[0]))
    model(tokens)
    embedded = model.embedding(tokens)
    assert torch.equal(given[0], torch.cat([embedded, embedded], -1))
    assert given[1].shape[-1] == 12
    assert all(torch.equal(x[..., 12:], embedded) for x in given[2:])


def test_no_model_carries_two_kinds_of_channels():
    with pytest.raises(ValueError, match=r"mixer is .*; expected not both zamba2 and rwkv7, which carry channels"):
        LanguageModel(LanguageModelConfig(11, None, 3, 12, 0, ["zamba2", "rwkv7", "rwkv7"], {"zamba2": SIZES}))
