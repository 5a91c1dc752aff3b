"""Gated attention against the sum that its docstring says, over a window, however the stream is cut."""

import math

import pytest
import torch
from tests.mixers.stepwise import require_float32_states

from recurra.mixers.gated_attention import GatedAttention

CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def make(**options) -> GatedAttention:
    layer = GatedAttention(12, **options).double()
    with torch.no_grad():
        for norm in (layer.query_norm, layer.key_norm):
            norm.weight.uniform_(0.5, 1.5)
    return layer


def normed(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + norm.epsilon).sqrt() * norm.weight


def by_the_sum(layer, x, base, window):
    """Step by step, with complex numbers in the place of rotations."""
    heads, groups, d_head = layer.n_heads, layer.n_kv_heads, layer.d_head
    sizes = [heads * d_head, groups * d_head, groups * d_head]
    q, k, v = (part.unflatten(-1, (-1, d_head)) for part in layer.qkv(x).split(sizes, -1))
    q, k = normed(q, layer.query_norm), normed(k, layer.key_norm)
    k, v = (part[:, :, [head * groups // heads for head in range(heads)]] for part in (k, v))
    q, k = (torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) for part in (q, k))
    theta = base ** (-torch.arange(0, layer.n_rotated, 2, dtype=torch.float64) / layer.n_rotated)
    theta = torch.cat([theta, torch.zeros(d_head // 2 - len(theta), dtype=torch.float64)])
    y = torch.zeros_like(v)
    for n in range(x.shape[1]):
        steps = range(max(0, n - window + 1), n + 1)
        turned = [k[:, m] * torch.polar(torch.ones_like(theta), -theta * (n - m)) for m in steps]
        scores = torch.stack([(q[:, n] * key.conj()).real.sum(-1) for key in turned], -1) / math.sqrt(d_head)
        y[:, n] = torch.einsum("bhm,bmhd->bhd", scores.softmax(-1), v[:, steps[0] : n + 1])
    return (torch.sigmoid(x @ layer.gate_projection.weight.T) * y.flatten(2)) @ layer.output_projection.weight.T


@pytest.mark.parametrize(
    ("options", "base"),
    [
        ({"n_heads": 3, "window": None}, 10000.0),
        ({"n_heads": 2, "window": 4, "rotation_base": 7.0}, 7.0),
        ({"n_heads": 4, "n_kv_heads": 2, "d_head": 8, "rotated_share": 0.25, "norm_epsilon": 0.3}, 10000.0),
    ],
    ids=str,
)
def test_it_is_the_sum_and_so_are_its_gradients(options, base):
    layer, x = make(**options), torch.randn(2, 11, 12, dtype=torch.float64, requires_grad=True)
    window = options.get("window") or 128
    first, state = layer(x[:, :4])
    results = [torch.cat([first, layer(x[:, 4:], state)[0]], 1), by_the_sum(layer, x, base, window)]
    torch.testing.assert_close(*results, **CLOSE)
    weights, leaves = torch.randn_like(results[0]), [x, *layer.parameters()]
    found, expected = (torch.autograd.grad((weights * y).sum(), leaves) for y in results)
    for one, other in zip(found, expected, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_states_are_in_float32():
    require_float32_states(lambda: GatedAttention(12, n_heads=2), 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 2, "norm_epsilon": 0.0}, "norm_epsilon is 0.0; expected a finite number above 0"),
        ({"n_heads": 2, "rotation_base": -1.0}, "rotation_base is -1.0; expected a finite number above 0"),
        ({"n_heads": 5}, "n_heads is 5; expected a divisor of d_model = 12"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GatedAttention(12, **options)
