"""RetNet's layer against the parallel form of its paper, with absolute positions."""

import math

import pytest
import torch
from tests.gradients import require_same_gradients
from torch import nn

from recurra.mixers.retnet import Retention

D_MODEL = 8
OPTIONS = [{}, {"n_heads": 2}, {"n_heads": 3, "d_qk": 12, "d_v": 9}, {"n_heads": 1, "d_v": 8}]


def in_parallel(layer: Retention, x: torch.Tensor) -> torch.Tensor:
    """MSR(x) of arXiv 2307.08621 (5) and (8), without the normalisations of the scores, which the norm cancels."""
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
        scores = (own_q @ own_k.mH).real / math.sqrt(d_k) * decay
        outputs.append(scores @ v.split(d_v, -1)[h])
    norm = nn.GroupNorm(heads, heads * d_v, affine=False).double()
    y = norm(torch.cat(outputs, -1).flatten(0, 1)).unflatten(0, (batch, length))
    return (gate * torch.sigmoid(gate) * y) @ layer.output_projection.weight.T


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_and_gradients_are_the_papers(options):
    layer = Retention(D_MODEL, **options).double()
    x = torch.randn(2, 75, D_MODEL, dtype=torch.float64, requires_grad=True)
    require_same_gradients(layer(x)[0], in_parallel(layer, x), [x, *layer.parameters()], 1e-10)


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
