"""GateLoop's attention layer against its equation, one pair of steps at a time."""

import math

import pytest
import torch

from recurra.mixers.gateloop_attention import GateLoopAttention

D_MODEL = 8


def by_the_equation(layer: GateLoopAttention, x: torch.Tensor) -> torch.Tensor:
    d_k, d_v = layer.d_qk // layer.n_heads, layer.d_v // layer.n_heads
    magnitude, phase = layer.transition(x)
    a = magnitude * torch.exp(1j * phase)
    q, k, v = layer.qkv(x).split([layer.d_qk, layer.d_qk, layer.d_v], -1)
    steps = []
    for n in range(x.shape[1]):
        oldest = 0 if layer.window is None else max(0, n - layer.window + 1)
        parts = []
        for h in range(layer.n_heads):
            key, value = slice(h * d_k, (h + 1) * d_k), slice(h * d_v, (h + 1) * d_v)
            scores = [
                (q[:, n, key] * k[:, m, key] * a[:, m + 1 : n + 1, key].prod(1)).real.sum(-1) / math.sqrt(d_k)
                for m in range(oldest, n + 1)
            ]
            weights = torch.stack(scores, -1).softmax(-1)
            parts.append(torch.einsum("bm,bmv->bv", weights, v[:, oldest : n + 1, value]))
        steps.append(torch.cat(parts, -1))
    return layer.output_projection(torch.stack(steps, 1))


@pytest.mark.parametrize(
    "options",
    [
        {"window": 5},
        {"window": 1, "n_heads": 8},
        {"window": None, "n_heads": 3, "d_qk": 6, "d_v": 9},
        {"window": 19, "transition": "fixed", "n_heads": 2},
        {"window": 20, "magnitude_activation": "stable_exponential"},
    ],
    ids=str,
)
def test_layer_computes_the_equation(options):
    layer = GateLoopAttention(D_MODEL, **options).double()
    x = torch.randn(2, 20, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], by_the_equation(layer, x), rtol=1e-11, atol=1e-12)
