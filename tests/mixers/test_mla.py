"""Multi-head latent attention: the sum that its docstring says, over a window, by keys and by latents."""

import math

import pytest
import torch
from tests.gradients import require_same_gradients

from recurra.mixers.mla import MultiHeadLatentAttention


def make(**options):
    torch.manual_seed(0)
    layer = MultiHeadLatentAttention(12, **options).double()
    with torch.no_grad():
        layer.norm.weight.uniform_(0.5, 1.5)
    return layer


def normed(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + norm.epsilon).sqrt() * norm.weight


def turned(x, steps, base):
    if base is None:
        return x
    theta = base ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(theta), theta * steps
    )
    return torch.view_as_real(z).flatten(-2)


def by_the_sum(layer, x):
    """Step by step and head by head."""
    if layer.d_query_latent:
        all_queries = normed(x @ layer.query_compression.weight.T, layer.query_norm) @ layer.queries.weight.T
    else:
        all_queries = x @ layer.queries.weight.T
    latents, shared = (x @ layer.compression.weight.T).split([layer.d_latent, layer.d_shared], -1)
    latents, outputs = normed(latents, layer.norm), []
    heads = layer.expansion.weight.view(layer.n_heads, -1, layer.d_latent)
    queries = all_queries.unflatten(-1, (layer.n_heads, -1))
    for n in range(x.shape[1]):
        seen = range(0 if layer.window is None else max(0, n - layer.window + 1), n + 1)
        step = []
        for head, weight in enumerate(heads):
            q, p = queries[:, n, head, : layer.d_head], queries[:, n, head, layer.d_head :]
            scores = [
                (q * (latents[:, m] @ weight[: layer.d_head].T)).sum(-1)
                + (p * turned(shared[:, m], m - n, layer.rotation_base)).sum(-1)
                for m in seen
            ]
            weights = (torch.stack(scores, -1) / math.sqrt(layer.d_head + layer.d_shared)).softmax(-1)
            values = torch.stack([latents[:, m] @ weight[layer.d_head :].T for m in seen], 1)
            step.append((weights[..., None] * values).sum(1))
        outputs.append(torch.cat(step, -1))
    return torch.stack(outputs, 1) @ layer.output_projection.weight.T


@pytest.mark.parametrize(
    "options",
    [
        *({"n_heads": 3, "window": window} for window in (1, 3, 64, None)),
        {"n_heads": 2, "d_value": 5, "d_latent": 7, "window": 5, "rotation_base": 7.0},
        {"n_heads": 4, "d_head": 5, "d_value": 8, "d_shared": 3, "rotation_base": None, "window": None},
        {"n_heads": 2, "d_query_latent": 5, "d_latent": 40, "norm_epsilon": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("few", [False, True])
def test_it_is_the_sum_and_so_are_its_gradients(monkeypatch, options, few):
    layer, x = make(**options), torch.randn(2, 11, 12, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(layer, "_has_few_queries", lambda *_: few)
    first, state = layer(x[:, :4])
    kept = min(4, 4 if layer.window is None else layer.window - 1)
    assert [part.shape for part in state] == [(2, kept, layer.d_latent), (2, kept, layer.d_shared)]
    found, expected = torch.cat([first, layer(x[:, 4:], state)[0]], 1), by_the_sum(layer, x)
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-10, atol=1e-11)
    require_same_gradients(found, expected, [x, *layer.parameters()], 1e-10)


def test_the_order_of_products_is_the_cheaper_one():
    """With DeepSeek-V2's sizes: a step reads the latents of all others once; a prompt makes keys and values of them."""
    layer = MultiHeadLatentAttention(64, n_heads=2, d_head=128, d_latent=512, d_shared=64)
    assert layer._has_few_queries(1, 4096)
    assert not layer._has_few_queries(4096, 4096)
