"""DeltaNet, Gated DeltaNet and KDA against their equations, step by step. tests/convert has Qwen3-Next's."""

import pytest
import torch
from tests.mixers.stepwise import require_same
from torch import Tensor
from torch.nn import functional

from recurra.mixers.delta_net import DeltaMixer, DeltaNet, DeltaNetState
from recurra.mixers.gated_delta_net import GatedDeltaNet
from recurra.mixers.kda import KimiDeltaAttention

D_MODEL = 6
OPTIONS = {"n_heads": 2, "d_qk": 8, "d_v": 6}


def draw_state(layer: DeltaMixer, batch: int = 2) -> DeltaNetState:
    return DeltaNetState(*(torch.randn_like(part.double()) for part in layer.initial_state(batch)))


def by_a_loop(layer: DeltaMixer, x: Tensor, state: DeltaNetState) -> tuple[Tensor, DeltaNetState]:
    """S_t = S_{t-1} diag(a_t) (I - b_t k_t k_t^T) + b_t v_t k_t^T with columns; a convolution sums its window."""
    heads, kernel = layer.n_heads, layer.convolution.weight[:, 0]
    s, window, outputs = state.h.mT, state.inputs, []
    for step in x.unbind(1):
        window = torch.cat([window, (step @ layer.qkv.weight.T)[:, None]], 1)
        mixed = torch.einsum("bkc,ck->bc", window, kernel)
        window = window[:, 1:]
        parts = (mixed * torch.sigmoid(mixed)).split([layer.d_qk, layer.d_qk, layer.d_v], -1)
        q, k, v = (part.unflatten(-1, (heads, -1))[..., None] for part in parts)
        q, k = (part / (part.square().sum(-2, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        b = torch.sigmoid(step @ layer.rate_projection.weight.T)[..., None, None] * layer.largest_rate
        if not isinstance(layer, DeltaNet):
            size = torch.log(1 + torch.exp(layer.decay_projection(step) + layer.dt_bias)).unflatten(-1, (heads, -1))
            s = torch.exp(-torch.exp(layer.A_log)[:, None] * size)[..., None, :] * s
        s = s @ (torch.eye(k.shape[-2]).double() - b * k @ k.mT) + b * v @ k.mT
        y = (s @ q)[..., 0] / q.shape[-2] ** 0.5
        y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight).flatten(1)
        if not isinstance(layer, DeltaNet):
            gate = layer.gate_projection(step)
            y = y * torch.sigmoid(gate) * (gate if isinstance(layer, GatedDeltaNet) else 1)
        outputs.append(y @ layer.output_projection.weight.T)
    return torch.stack(outputs, 1), DeltaNetState(s.mT, window)


@pytest.mark.parametrize("kind", [DeltaNet, GatedDeltaNet, KimiDeltaAttention])
@pytest.mark.parametrize(("length", "negative"), [(1, False), (3, True), (70, False), (70, True)])
def test_it_is_its_recurrence_outputs_state_and_gradients(kind, length, negative):
    layer = kind(D_MODEL, **OPTIONS, negative_eigenvalues=negative).double()
    torch.nn.init.normal_(layer.norm.weight)
    require_same(layer, by_a_loop, torch.randn(2, length, D_MODEL, dtype=torch.float64), draw_state(layer), 1e-9)


def test_shared_queries_and_keys_are_those_of_as_many_equal_heads():
    """The parts of the wider layer's q and k are repeated, two heads of values each."""
    options = {"n_heads": 4, "d_v": 8, "norm_epsilon": 0.1}
    layer = GatedDeltaNet(D_MODEL, **options, d_qk=6, n_qk_heads=2).double()
    wide = GatedDeltaNet(D_MODEL, **options, d_qk=12).double()
    weights = dict(layer.state_dict())
    for name in ("qkv.weight", "convolution.weight"):
        q, k, v = weights[name].split([6, 6, 8])
        q, k = (part.unflatten(0, (2, 3)).repeat_interleave(2, 0).flatten(0, 1) for part in (q, k))
        weights[name] = torch.cat([q, k, v])
    wide.load_state_dict(weights)
    x = torch.randn(2, 70, D_MODEL, dtype=torch.float64)
    (y, state), (expected, other) = layer(x), wide(x)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(state.h, other.h, rtol=1e-11, atol=1e-12)
    assert layer.norm.epsilon == 0.1


@pytest.mark.parametrize(("kind", "slowest"), [(GatedDeltaNet, 0), (KimiDeltaAttention, 1)])
def test_decays_start_in_the_published_range(kind, slowest):
    layer = kind(64, n_heads=512, d_qk=512)
    rates, steps = layer.A_log.exp(), functional.softplus(layer.dt_bias)
    assert slowest < rates.min() < slowest + 0.2
    assert 15.8 < rates.max() <= 16.001
    assert 0.00099 < steps.min() < 0.0011
    assert 0.09 < steps.max() < 0.1001


@pytest.mark.parametrize(("d_model", "d_qk"), [(2048, 1536), (64, 48), (12, 6), (1, 6)])
def test_sizes_are_the_published_ones(d_model, d_qk):
    with torch.device("meta"):
        layer = GatedDeltaNet(d_model)
    assert (layer.n_heads, layer.d_qk, layer.d_v) == (6, d_qk, 2 * d_qk)
    assert layer.state_layout.h.shape == (6, d_qk // 6, d_qk // 3)


def test_the_sizes_of_kda_are_those_of_the_published_model():
    """Kimi Linear's layer: 32 heads of 128 channels, whose decay and gate have the rank of a head."""
    with torch.device("meta"):
        layer = KimiDeltaAttention(2304, d_qk=4096, n_heads=32)
    sizes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    assert sizes == {
        **{"A_log": (32,), "dt_bias": (4096,), "norm.weight": (128,)},
        **{
            "qkv.weight": (3 * 4096, 2304),
            "convolution.weight": (3 * 4096, 1, 4),
            "rate_projection.weight": (32, 2304),
        },
        **{f"{name}_projection.0.weight": (128, 2304) for name in ("decay", "gate")},
        **{f"{name}_projection.1.weight": (4096, 128) for name in ("decay", "gate")},
        "output_projection.weight": (2304, 4096),
    }
