"""Rotary and gated attention: equal to the sums that their docstrings say, over a window, however the stream is cut."""

import math

import pytest
import torch
from tests.gradients import require_same_gradients

from recurra.mixers.gated_attention import GatedAttention
from recurra.mixers.rotary_attention import RotaryAttention


def make(kind=RotaryAttention, **options):
    torch.manual_seed(0)
    layer = kind(12, **options).double()
    with torch.no_grad():
        for weight in (*layer.query_norm.parameters(), *layer.key_norm.parameters()):
            weight.uniform_(0.5, 1.5)
    return layer


def normed(x, norm):
    if len(norm.weight) > x.shape[-1]:
        return normed(x.flatten(2), norm).unflatten(2, (x.shape[2], -1))
    return x / (x.square().mean(-1, keepdim=True) + norm.epsilon).sqrt() * norm.weight


def by_the_sum(layer, x):
    """Step by step, with complex numbers in the place of rotations."""
    n_heads, groups, d_head = layer.n_heads, layer.n_kv_heads, layer.output_projection.in_features // layer.n_heads
    sizes = [n_heads * d_head, groups * d_head, groups * d_head]
    q, k, v = (part.unflatten(-1, (-1, d_head)) for part in layer.qkv(x).split(sizes, -1))
    if list(layer.query_norm.parameters()):
        q, k = normed(q, layer.query_norm), normed(k, layer.key_norm)
    k, v = (part[:, :, [head * groups // n_heads for head in range(n_heads)]] for part in (k, v))
    q, k = (torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) for part in (q, k))
    theta = layer.rotation_base ** (-torch.arange(0, layer.n_rotated, 2, dtype=torch.float64) / layer.n_rotated)
    theta = torch.cat([theta, torch.zeros(d_head // 2 - len(theta), dtype=torch.float64)])  # the rest stands still
    y = torch.zeros_like(v)
    for n in range(x.shape[1]):
        first = 0 if layer.window is None else max(0, n - layer.window + 1)
        turned = [k[:, m] * torch.polar(torch.ones_like(theta), -theta * (n - m)) for m in range(first, n + 1)]
        scores = torch.stack([(q[:, n] * key.conj()).real.sum(-1) for key in turned], -1) / math.sqrt(d_head)
        y[:, n] = torch.einsum("bhm,bmhd->bhd", scores.softmax(-1), v[:, first : n + 1])
    y = y.flatten(2)
    if isinstance(layer, GatedAttention):
        y = torch.sigmoid(x @ layer.gate_projection.weight.T) * y
    return layer.output_projection(y)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((RotaryAttention, {"n_heads": 3, "window": window}) for window in (1, 3, 64, None)),
        (RotaryAttention, {"n_heads": 2, "n_kv_heads": 1, "window": 5}),
        (RotaryAttention, {"n_heads": 4, "n_kv_heads": 2, "d_head": 8, "rotated_share": 0.5, "window": 5}),
        (RotaryAttention, {"n_heads": 2, "n_kv_heads": 1, "d_head": 10, "rotated_share": 0.4, "output_bias": True}),
        (RotaryAttention, {"n_heads": 2, "n_kv_heads": 2, "rotated_share": 0.0, "window": 5}),
        (RotaryAttention, {"n_heads": 4, "n_kv_heads": 2, "d_head": 6, "window": 5, "qk_norm": 0.2}),
        (RotaryAttention, {"n_heads": 4, "n_kv_heads": 2, "d_head": 6, "qk_norm": 0.2, "qk_norm_over": "all"}),
        (GatedAttention, {"n_heads": 3, "window": None}),
        (GatedAttention, {"n_heads": 2, "window": 4, "rotation_base": 7.0}),
        (GatedAttention, {"n_heads": 4, "n_kv_heads": 2, "d_head": 8, "rotated_share": 0.25, "norm_epsilon": 0.3}),
    ],
    ids=str,
)
def test_it_is_the_sum_and_so_are_its_gradients(kind, options):
    layer, x = make(kind, **options), torch.randn(2, 11, 12, dtype=torch.float64, requires_grad=True)
    assert layer.rotation_base == options.get("rotation_base", 10000.0)
    first, state = layer(x[:, :4])
    kept = min(4, 4 if layer.window is None else layer.window - 1)
    assert state.keys.shape == (2, kept, layer.n_kv_heads, layer.d_head)
    found, expected = torch.cat([first, layer(x[:, 4:], state)[0]], 1), by_the_sum(layer, x)
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-10, atol=1e-11)
    require_same_gradients(found, expected, [x, *layer.parameters()], 1e-10)
