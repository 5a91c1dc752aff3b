"""GateLoop with transitions as in section 3.1 is RetNet's retention; with transitions of 1 it is linear attention."""

import math

import pytest
import torch

from recurra import gate_loop

MODES = ("recurrent", "scan", "chunk", "attention")
LENGTH, HEADS, D_K, D_V = 150, 3, 6, 5


def draw(batch: int = 2):
    q, k = torch.randn(2, batch, LENGTH, HEADS, D_K, dtype=torch.float64)
    return q, k * D_K**-0.5, torch.randn(batch, LENGTH, HEADS, D_V, dtype=torch.float64)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Row n of x times a matrix of 2 x 2 rotations by n theta_i, theta_i = 10000^(-2i/d), as RoPE and xPos have it."""
    rows = []
    for n in range(x.shape[1]):
        blocks = []
        for i in range(D_K // 2):
            angle = (n + 1) * 10000 ** (-2 * i / D_K)
            cos, sin = math.cos(angle), math.sin(angle)
            blocks.append(torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64))
        rows.append(x[:, n] @ torch.block_diag(*blocks))
    return torch.stack(rows, 1)


def retention(q, k, v):
    """The parallel form, arXiv 2307.08621 (5): ((Q Theta)(K conj(Theta))^T . D) V with D_nm = gamma^(n-m), n >= m."""
    q, k = turned(q), turned(k)
    outputs = []
    for head in range(HEADS):
        gamma = 1 - 2.0 ** (-5 - head)
        decays = [[gamma ** (n - m) if n >= m else 0.0 for m in range(LENGTH)] for n in range(LENGTH)]
        scores = (q[:, :, head] @ k[:, :, head].transpose(1, 2)) * torch.tensor(decays, dtype=torch.float64)
        outputs.append(scores @ v[:, :, head])
    return torch.stack(outputs, 2)


@pytest.mark.parametrize("mode", MODES)
def test_retention_by_a_complex_gate(mode):
    """(11): a = gamma exp(i theta) on the key channels, each a pair of real ones; nothing is rotated by a position."""
    q, k, v = draw()
    gamma = 1 - torch.exp2(-5 - torch.arange(HEADS, dtype=torch.float64))
    theta = 10000 ** (-torch.arange(0, D_K, 2, dtype=torch.float64) / D_K)
    a = gamma[:, None] * torch.polar(torch.ones_like(theta), theta)
    pairs_q, pairs_k = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (q, k))
    y, _ = gate_loop(pairs_q, pairs_k.conj().resolve_conj(), v, a.expand(2, LENGTH, -1, -1), mode=mode)
    torch.testing.assert_close(y.real, retention(q, k, v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_retention_by_a_real_gate_and_rotated_queries_and_keys(mode):
    q, k, v = draw()
    gamma = 1 - torch.exp2(-5 - torch.arange(HEADS, dtype=torch.float64))
    y, _ = gate_loop(turned(q), turned(k), v, gamma[:, None].expand(2, LENGTH, -1, -1), mode=mode)
    torch.testing.assert_close(y, retention(q, k, v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_linear_attention(mode):
    """a = 1 gives the cumulative sums of arXiv 2006.16236 (9)-(10); with v = 1 it gives the normaliser."""
    q, k, v = draw()
    q, k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    sums = torch.cumsum(k[..., :, None] * v[..., None, :], 1)
    numerator = torch.einsum("blhd,blhdv->blhv", q, sums)
    normaliser = torch.einsum("blhd,blhd->blh", q, torch.cumsum(k, 1))
    ones = torch.ones(2, LENGTH, HEADS, 1, dtype=torch.float64)
    y, h = gate_loop(q, k, v, ones, mode=mode)
    torch.testing.assert_close(y, numerator, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(h, sums[:, -1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gate_loop(q, k, ones, ones, mode=mode)[0][..., 0], normaliser, rtol=1e-10, atol=1e-10)
