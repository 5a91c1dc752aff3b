"""The GateLoop layer against its equations, written out."""

import pytest
import torch

from recurra.layers.transition import stable_exponential
from recurra.mixers.gateloop import GateLoop


def by_the_equations(layer: GateLoop, x: torch.Tensor) -> torch.Tensor:
    """GateLoop (7)-(8) and (24)-(25), one step and one head at a time."""
    d_k, d_v, heads = layer.d_qk // layer.n_heads, layer.d_v // layer.n_heads, layer.n_heads
    magnitude, phase = layer.transition(x)
    a = torch.polar(magnitude.contiguous(), phase.contiguous())
    rows = []
    for b in range(x.shape[0]):
        h = torch.zeros(heads, d_k, d_v, dtype=torch.complex128)
        steps = []
        for n in range(x.shape[1]):
            q, k, v = layer.qkv(x[b, n]).split([layer.d_qk, layer.d_qk, layer.d_v])
            parts = []
            for i in range(heads):
                key, value = slice(i * d_k, (i + 1) * d_k), slice(i * d_v, (i + 1) * d_v)
                h = h.clone()
                h[i] = torch.diag(a[b, n, key]) @ h[i] + torch.outer(k[key], v[value])
                parts.append((q[key].to(h.dtype) @ h[i]).real)
            steps.append(torch.cat(parts))
        rows.append(torch.stack(steps))
    y = torch.stack(rows)
    return layer.output_projection(layer.output_gate(x, y) if layer.output_gate else y)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transition": "fixed"},
        {"d_qk": 6, "d_v": 4, "n_heads": 2},
        {"d_qk": 4, "d_v": 8, "n_heads": 4, "output_gate": True},
        {"magnitude_activation": "stable_exponential"},
    ],
    ids=str,
)
def test_layer_computes_the_equations(options):
    layer = GateLoop(8, **options).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], by_the_equations(layer, x), rtol=1e-12, atol=1e-12)


def test_stable_exponential_has_a_gradient_of_0_where_it_is_0():
    alpha = torch.tensor([90.0, 1e30, float("inf")], requires_grad=True)
    stable_exponential(alpha).sum().backward()
    assert alpha.grad.eq(0).all()


def test_stable_exponential_is_lrus():
    alpha = torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64)
    expected = [0.9514319929004534, 0.36787944117144233, 0.0006179789893310935]  # exp(-exp(alpha)), computed apart
    torch.testing.assert_close(stable_exponential(alpha), torch.tensor(expected, dtype=torch.float64))


def test_autocast_leaves_the_gates_in_float32():
    """Also their projection: in bfloat16, the error of a phase near pi is 0.008 at every step."""
    layer, x = GateLoop(8), torch.randn(1, 3, 8)
    expected = layer.transition(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer.transition(x), expected, rtol=0, atol=0)
