"""causal_attention through plain products: the attention of float64, its gradients and what needs them."""

import pytest
import torch

from recurra.layers import attention as module
from recurra.layers.attention import causal_attention, dot_product_attention


def draw(n_queries, n_keys):
    """bfloat16 queries, keys and values in the layout of a layer: heads behind steps in memory."""
    sizes = [n_queries, n_keys, n_keys]
    return [torch.randn(2, n, 3, 6).bfloat16().transpose(1, 2).requires_grad_() for n in sizes]


def differentiate(inputs, **options):
    y = causal_attention(*inputs, **options)
    return [y, *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), inputs)]


@pytest.fixture
def fast_kernel(monkeypatch):
    """Count the calls of torch's own attention."""
    calls = []
    monkeypatch.setattr(
        module, "dot_product_attention", lambda *a, **o: calls.append(o) or dot_product_attention(*a, **o)
    )
    return calls


@pytest.mark.parametrize("n_before", [None, 0, 4])
def test_products_are_the_attention(n_before, fast_kernel):
    """Without a mask, and with one whose window of 3 steps reaches into earlier calls."""
    inputs, options = draw(5, 5 + (n_before or 0)), {}
    if n_before is not None:
        age = torch.arange(n_before, 5 + n_before)[:, None] - torch.arange(5 + n_before)
        options = {"visible": (age >= 0) & (age < 3)}
    found = differentiate(inputs, **options)
    assert not fast_kernel
    expected = differentiate([x.double().detach().requires_grad_() for x in inputs], **options)
    assert len(fast_kernel) == 1
    for one, other in zip(found, expected):
        assert one.dtype == torch.bfloat16
        assert (one - other).norm() < 0.02 * other.norm()


def test_what_is_long_or_needs_no_gradient_takes_the_fast_kernel(fast_kernel, monkeypatch):
    inputs = draw(5, 5)
    with torch.no_grad():
        causal_attention(*inputs)
    monkeypatch.setattr(module, "_SHORT", 4)
    causal_attention(*inputs)
    assert fast_kernel == [{"dropout_p": 0.0, "is_causal": True}] * 2


@pytest.mark.parametrize("mask", [None, (4, 5), (1, 3, 4, 5), (7, 3, 4, 5)])
def test_many_sequences_are_read_in_pieces(monkeypatch, mask):
    inputs = [torch.randn(7, 3, n, 6, dtype=torch.double) for n in (4, 5, 5)]
    options = {} if mask is None else {"attn_mask": torch.randn(mask, dtype=torch.double)}
    expected = dot_product_attention(*inputs, **options)
    monkeypatch.setattr(module, "_MOST_ROWS", 3)
    assert (dot_product_attention(*inputs, **options) - expected).abs().max() < 1e-14
