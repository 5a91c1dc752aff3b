"""Performer against its sums of features, written out, and against the softmax that they estimate."""

import pytest
import torch
from tests.gradients import require_same_gradients

from recurra.mixers.performer import Performer, PerformerState, _orthogonal_features

D_MODEL = 6


def split(layer: Performer, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v as (B, H, L, d_head)."""
    return tuple(part.unflatten(-1, (layer.n_heads, -1)).transpose(1, 2) for part in layer.qkv(x).chunk(3, -1))


def features(layer: Performer, x: torch.Tensor) -> torch.Tensor:
    """phi(x), feature by feature (Lemma 1), without any stabiliser."""
    w = layer.features
    x = x / x.shape[-1] ** 0.25
    columns = [torch.exp((x * row).sum(-1) - (x * x).sum(-1) / 2) for row in w]
    return torch.stack(columns, -1) / len(w) ** 0.5


def by_the_sums(layer: Performer, x: torch.Tensor, sums: torch.Tensor | None = None):
    """Outputs and the sums of phi(k)^T [v, 1], continuing from `sums`."""
    q, k, v = split(layer, x)
    outputs = []
    for n in range(x.shape[1]):
        value = torch.cat([v[:, :, n], torch.ones_like(v[:, :, n, :1])], -1)
        added = features(layer, k[:, :, n])[..., None] * value[..., None, :]
        sums = added if sums is None else sums + added
        y = (features(layer, q[:, :, n])[..., None] * sums).sum(-2)
        outputs.append(y[..., :-1] / y[..., -1:])
    return layer.output_projection(torch.stack(outputs, 1).flatten(-2)), sums


def true_sums(layer: Performer, state: PerformerState) -> torch.Tensor:
    """What the state stands for."""
    return state.h * state.peak.exp()[..., None] / len(layer.features) ** 0.5


@pytest.mark.parametrize("options", [{"n_heads": 2, "n_features": 5}, {"n_heads": 3}, {"n_heads": 1}], ids=str)
def test_outputs_state_and_gradients_are_the_sums(options):
    layer = Performer(D_MODEL, **options).double()
    x = torch.randn(2, 17, D_MODEL, dtype=torch.float64, requires_grad=True)
    before = torch.randn(2, 3, D_MODEL, dtype=torch.float64, requires_grad=True)
    y, state = layer(x, layer(before)[1])
    expected, leaves = by_the_sums(layer, x, by_the_sums(layer, before)[1]), [x, before, *layer.parameters()]
    require_same_gradients((y, true_sums(layer, state)), expected, leaves, 1e-11)


@pytest.mark.parametrize("scale", [30.0, 3000.0])
def test_features_that_overflow_or_vanish_give_what_float64_gives(scale):
    """Exponents far beyond those of float32, of both signs."""
    layer, x = Performer(D_MODEL, n_heads=2), scale * torch.randn(2, 9, D_MODEL)
    y, state = layer(x)
    assert y.isfinite().all()
    assert state.h.isfinite().all()
    y.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    if scale == 30.0:
        torch.testing.assert_close(y, layer.double()(x.double())[0].float(), rtol=1e-3, atol=1e-2)


def test_many_features_are_softmax_attention():
    layer = Performer(D_MODEL, n_heads=2, n_features=60_000).double()
    x = torch.randn(1, 3, D_MODEL, dtype=torch.float64)
    q, k, v = split(layer, x)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = layer.output_projection(expected.transpose(1, 2).flatten(-2))
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=0.01)


def test_features_are_orthogonal_within_blocks_and_gaussian_in_length():
    w = _orthogonal_features(10, 4).double()
    for block in w.split(4):
        gram = block @ block.T
        torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-5)
    many = _orthogonal_features(8000, 4)
    torch.testing.assert_close(many.T @ many / 8000, torch.eye(4), rtol=0, atol=0.07)
    assert many.mean(0).abs().max() < 0.05
    assert 0.5 < many.square().sum(1).var() / 8 < 1.5  # of a chi-squared variable with 4 degrees of freedom


def test_the_first_step_reads_its_own_value():
    """Whatever the features: their sum divides itself out, also where it is 1."""
    layer, x = Performer(8, n_heads=2, n_features=1).double(), torch.randn(3, 1, 8, dtype=torch.float64)
    expected = layer.output_projection(layer.qkv(x).chunk(3, -1)[2])
    torch.testing.assert_close(layer(x)[0], expected)
