"""Linear attention against its sums, written out."""

import pytest
import torch
from tests.gradients import require_same_gradients
from torch.nn import functional

from recurra.mixers.base import create_mixer
from recurra.mixers.linear_attention import LinearAttention, _elu_plus_one

D_MODEL = 8


def by_the_sums(layer: LinearAttention, x: torch.Tensor, normaliser: bool) -> torch.Tensor:
    """y_n = sum_m (phi(q_n) . phi(k_m)) v_m / sum_m phi(q_n) . phi(k_m), m <= n: one step and one head at a time."""
    d_k, d_v = layer.d_qk // layer.n_heads, layer.d_v // layer.n_heads
    q, k, v = layer.qkv(x).split([layer.d_qk, layer.d_qk, layer.d_v], -1)
    q, k = functional.elu(q) + 1, functional.elu(k) + 1
    steps = []
    for n in range(x.shape[1]):
        parts = []
        for h in range(layer.n_heads):
            key, value = slice(h * d_k, (h + 1) * d_k), slice(h * d_v, (h + 1) * d_v)
            weights = torch.einsum("bd,bmd->bm", q[:, n, key], k[:, : n + 1, key])
            y = torch.einsum("bm,bmv->bv", weights, v[:, : n + 1, value])
            parts.append(y / weights.sum(-1, keepdim=True) if normaliser else y)
        steps.append(torch.cat(parts, -1))
    return layer.output_projection(torch.stack(steps, 1))


@pytest.mark.parametrize("normaliser", [True, False])
@pytest.mark.parametrize("options", [{}, {"n_heads": 3, "d_qk": 6, "d_v": 9}, {"n_heads": 8}], ids=str)
def test_outputs_and_gradients_are_the_sums(options, normaliser):
    layer = LinearAttention(D_MODEL, normaliser=normaliser, **options).double()
    x = torch.randn(2, 30, D_MODEL, dtype=torch.float64, requires_grad=True)
    tolerance = 1e-5 if normaliser else 1e-12  # the normaliser has an epsilon of 1e-6 added
    require_same_gradients(layer(x)[0], by_the_sums(layer, x, normaliser), [x, *layer.parameters()], tolerance)


def test_the_feature_map():
    x = torch.linspace(-30, 5, 141, dtype=torch.float64)
    torch.testing.assert_close(_elu_plus_one(x), functional.elu(x) + 1, rtol=1e-12, atol=1e-15)
    far = torch.tensor([-80.0, 0.0, 1e5], requires_grad=True)
    y = _elu_plus_one(far)
    torch.testing.assert_close(y.detach(), torch.tensor([1.8048514e-35, 1.0, 100001.0]), rtol=1e-5, atol=0)
    (slope,) = torch.autograd.grad(y.sum(), far)
    torch.testing.assert_close(slope, torch.tensor([1.8048514e-35, 1.0, 1.0]), rtol=1e-5, atol=0)


def test_a_head_whose_features_vanish_gives_zeros():
    layer = LinearAttention(D_MODEL, n_heads=2)
    x = torch.randn(1, 4, D_MODEL)
    with torch.no_grad():
        layer.qkv.bias[:16] = -500
    y = layer(x)[0]
    torch.testing.assert_close(y, layer.output_projection.bias.expand_as(y))
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("size", [8, 32])  # small heads are scanned, large ones computed in chunks
@pytest.mark.parametrize("name", ["gla", "linear-attention", "retnet"])
def test_sums_are_float32_under_autocast(name, size):
    """With q = k = v = x in bfloat16, autocast has nothing to round but sums."""
    layer, x = create_mixer(name, size, d_qk=size, d_v=size, n_heads=2), torch.randn(1, 1100, size).bfloat16().float()
    with torch.no_grad():
        for projection, weight in layer.named_parameters():
            if projection in ("qkv.weight", "qkvg.weight"):
                weight.copy_(torch.eye(size).repeat(len(weight) // size, 1))
            elif projection == "qkv.bias" or projection.startswith("gate_projection.1"):
                weight.zero_()
        with torch.autocast("cpu", torch.bfloat16):
            _, state = layer(x)
        _, exact = layer(x)
    torch.testing.assert_close(state.h, exact.h, rtol=1e-5, atol=1e-5)
