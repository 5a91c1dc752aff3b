"""Gated linear attention against its equations, step by step."""

import pytest
import torch
from tests.mixers.stepwise import require_same

from recurra.mixers.gla import GatedLinearAttention, GatedLinearAttentionState

D_MODEL = 8
OPTIONS = [
    {"n_heads": 2},
    {"n_heads": 3, "d_qk": 6, "d_v": 9, "gate_rank": 2, "gate_temperature": 4.0},
    {"n_heads": 1, "d_qk": 1, "d_v": 1},
]


def norm(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale


def by_a_loop(layer: GatedLinearAttention, x: torch.Tensor, state: GatedLinearAttentionState):
    """Section 4.4, head by head and step by step."""
    heads, d_qk, d_v = layer.n_heads, layer.d_qk, layer.d_v
    w_q, w_k, w_v, w_g = layer.qkvg.weight.split([d_qk, d_qk, d_v, d_v])
    low, high = layer.gate_projection
    d_k = d_qk // heads
    outputs, s = [], list(state.h.unbind(1))
    for step in x.unbind(1):
        a = torch.sigmoid(step @ low.weight.T @ high.weight.T + high.bias) ** (1 / layer.gate_temperature)
        q, k, a = (part.chunk(heads, -1) for part in (step @ w_q.T * d_k**-0.5, step @ w_k.T, a))
        v, o = (step @ w_v.T).chunk(heads, -1), []
        for h in range(heads):
            s[h] = a[h][:, :, None] * s[h] + k[h][:, :, None] * v[h][:, None, :]
            o.append(norm((q[h][:, None] @ s[h])[:, 0], layer.norm.weight))
        gate = step @ w_g.T
        outputs.append((gate * torch.sigmoid(gate) * torch.cat(o, -1)) @ layer.output_projection.weight.T)
    return torch.stack(outputs, 1), GatedLinearAttentionState(torch.stack(s, 1))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_state_and_gradients_are_the_papers(options):
    layer = GatedLinearAttention(D_MODEL, **options).double()
    x, start = torch.randn(2, 11, D_MODEL, dtype=torch.float64), layer.initial_state(2)
    require_same(layer, by_a_loop, x, GatedLinearAttentionState(torch.randn_like(start.h)))


@pytest.mark.parametrize("bias", [500.0, -1e5])
def test_open_and_closed_gates(bias):
    """Open, the layer is linear attention; closed, it sees the last step alone. Gradients stay finite."""
    layer, x = GatedLinearAttention(D_MODEL, n_heads=2).double(), torch.randn(1, 5, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        layer.gate_projection[1].bias.fill_(bias)
    _, k, v, _ = layer.qkvg(x).split([4, 4, 8, 8], -1)
    outer = k.unflatten(-1, (2, -1))[..., None] * v.unflatten(-1, (2, -1))[..., None, :]
    y, state = layer(x)
    torch.testing.assert_close(state.h, outer.sum(1) if bias > 0 else outer[:, -1], rtol=1e-9, atol=1e-9)
    gradients = torch.autograd.grad(y.sum() + state.h.sum(), list(layer.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
