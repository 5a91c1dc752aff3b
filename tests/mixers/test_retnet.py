"""RetNet's layer against the parallel form of its paper, with absolute positions and all its normalisations."""

import math

import pytest
import torch
from torch import nn

from recurra.mixers.retnet import Retention, RetentionState

D_MODEL = 8
OPTIONS = [{}, {"n_heads": 2}, {"n_heads": 3, "d_qk": 12, "d_v": 9}, {"n_heads": 1, "d_v": 8}]


def in_parallel(layer: Retention, x: torch.Tensor, normalised: bool = False) -> torch.Tensor:
    """MSR(x) of arXiv 2307.08621 (5) and (8), with the paper's normalisations of the scores or without."""
    batch, length, _ = x.shape
    heads, d_k, d_v = layer.n_heads, layer.d_qk // layer.n_heads, layer.d_v // layer.n_heads
    q, k, v, gate = (x @ layer.qkvg.weight.T).split([layer.d_qk, layer.d_qk, layer.d_v, layer.d_v], -1)
    theta = torch.tensor([10000 ** (-2 * i / d_k) for i in range(d_k // 2)], dtype=torch.float64)
    turn = torch.exp(1j * torch.arange(1, length + 1)[:, None] * theta)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    outputs = []
    for h in range(heads):
        own_q, own_k = (torch.view_as_complex(p.split(d_k, -1)[h].unflatten(-1, (-1, 2))) * turn for p in (q, k))
        decay = torch.where(distance >= 0, (1 - 2.0 ** (-5 - h)) ** distance.double(), 0.0)
        if normalised:
            decay = decay / decay.sum(-1, keepdim=True).sqrt()
        scores = (own_q @ own_k.mH).real / math.sqrt(d_k) * decay
        if normalised:
            scores = scores / scores.sum(-1, keepdim=True).abs().clamp(min=1)
        outputs.append(scores @ v.split(d_v, -1)[h])
    norm = nn.GroupNorm(heads, heads * d_v, affine=False).double()
    y = norm(torch.cat(outputs, -1).flatten(0, 1)).unflatten(0, (batch, length))
    return (gate * torch.sigmoid(gate) * y) @ layer.output_projection.weight.T


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_and_gradients_are_the_papers(options):
    layer = Retention(D_MODEL, **options).double()
    x = torch.randn(2, 75, D_MODEL, dtype=torch.float64, requires_grad=True)
    y, expected = layer(x)[0], in_parallel(layer, x)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-10)
    weights, leaves = torch.randn_like(y), [x, *layer.parameters()]
    actual, right = (torch.autograd.grad((out * weights).sum(), leaves) for out in (y, expected))
    torch.testing.assert_close(actual, right, rtol=1e-8, atol=1e-9)


def test_the_normalisations_that_are_left_out_change_nothing():
    """But for the norm's epsilon, which large values make small."""
    layer = Retention(D_MODEL, n_heads=2).double()
    x = 300 * torch.randn(1, 40, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], in_parallel(layer, x, normalised=True), rtol=1e-6, atol=1e-3)
    assert layer(x)[0].abs().mean() > 10


def test_the_state_is_the_one_of_a_complex_gate():
    """h = sum_m (gamma e^(-i theta))^(n-m) k_m^T v_m over pairs of key channels: no absolute position in it."""
    layer = Retention(D_MODEL, n_heads=1, d_v=3).double()
    x = torch.randn(1, 20, D_MODEL, dtype=torch.float64)
    _, k, v, _ = layer.qkvg(x)[0].split([8, 8, 3, 3], -1)
    keys = torch.view_as_complex(k.unflatten(-1, (-1, 2)).contiguous()) / math.sqrt(8)
    gate = (1 - 1 / 32) * torch.exp(-1j * 10000 ** (-torch.arange(4, dtype=torch.float64) / 4))
    h = torch.zeros(4, 3, dtype=torch.complex128)
    for n in range(20):
        h = gate[:, None] * h + keys[n][:, None] * v[n]
    _, state = layer(x)
    assert isinstance(state, RetentionState)
    assert state.h.shape == (1, 1, 8, 3)
    pairs = state.h[0, 0].unflatten(0, (-1, 2)).movedim(1, -1)
    torch.testing.assert_close(torch.view_as_complex(pairs.contiguous()), h)


def test_a_million_steps_into_a_stream_nothing_is_lost():
    """float32 outputs there are those of a short stream of the last steps in float64: older ones are forgotten."""
    layer = Retention(4, n_heads=2, d_qk=8, d_v=12)
    period = torch.randn(1, 2**16, 4)
    with torch.no_grad():
        state = None
        for _ in range(16):
            y, state = layer(period, state)
        for _ in range(3):  # and on, one step at a time
            last, state = layer(period[:, :1], state)
        recent = torch.cat([period[:, -3000:], *[period[:, :1]] * 3], 1).double()
        expected, _ = layer.double()(recent)
    torch.testing.assert_close(y[:, -1].double(), expected[:, -4], rtol=0, atol=1e-4)
    torch.testing.assert_close(last[:, -1].double(), expected[:, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [8, 32])  # small heads are scanned, large ones computed in chunks
def test_sums_are_float32_under_autocast(size):
    """With q = k = v = x in bfloat16, autocast has nothing to round."""
    layer = Retention(size, n_heads=2, d_v=size)
    x = torch.randn(1, 1100, size).bfloat16().float()
    with torch.no_grad():
        layer.qkvg.weight.copy_(torch.eye(size).repeat(4, 1))
        with torch.autocast("cpu", torch.bfloat16):
            _, state = layer(x)
        _, exact = layer(x)
    torch.testing.assert_close(state.h, exact.h, rtol=1e-5, atol=1e-5)


def test_values_are_twice_as_wide_and_nothing_has_a_bias():
    layer = Retention(D_MODEL)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {
        "qkvg.weight": (2 * 8 + 2 * 16, 8),
        "output_projection.weight": (8, 16),
    }
