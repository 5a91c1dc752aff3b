"""GateLoop's attention layer against its equation, one pair of steps at a time; its window and its state."""

import math

import pytest
import torch

from recurra import state as states
from recurra.mixers.gateloop_attention import GateLoopAttention, GateLoopAttentionState

D_MODEL = 8


def by_the_equation(layer: GateLoopAttention, x: torch.Tensor) -> torch.Tensor:
    d_k, d_v = layer.d_qk // layer.n_heads, layer.d_v // layer.n_heads
    magnitude, phase = layer.transition(x)
    a = magnitude * torch.exp(1j * phase)
    q, k, v = layer.qkv(x).split([layer.d_qk, layer.d_qk, layer.d_v], -1)
    steps = []
    for n in range(x.shape[1]):
        oldest = 0 if layer.window is None else max(0, n - layer.window + 1)
        parts = []
        for h in range(layer.n_heads):
            key, value = slice(h * d_k, (h + 1) * d_k), slice(h * d_v, (h + 1) * d_v)
            scores = [
                (q[:, n, key] * k[:, m, key] * a[:, m + 1 : n + 1, key].prod(1)).real.sum(-1) / math.sqrt(d_k)
                for m in range(oldest, n + 1)
            ]
            weights = torch.stack(scores, -1).softmax(-1)
            parts.append(torch.einsum("bm,bmv->bv", weights, v[:, oldest : n + 1, value]))
        steps.append(torch.cat(parts, -1))
    return layer.output_projection(torch.stack(steps, 1))


@pytest.mark.parametrize(
    "options",
    [
        {"window": 5},
        {"window": 1, "n_heads": 8},
        {"window": None, "n_heads": 3, "d_qk": 6, "d_v": 9},
        {"window": 19, "transition": "fixed", "n_heads": 2},
        {"window": 20, "magnitude_activation": "stable_exponential"},
    ],
    ids=str,
)
def test_layer_computes_the_equation(options):
    layer = GateLoopAttention(D_MODEL, **options).double()
    x = torch.randn(2, 20, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], by_the_equation(layer, x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window", [1, 65, None])
def test_any_cut_gives_the_whole(window):
    layer = GateLoopAttention(D_MODEL, window=window).double()
    x = torch.randn(2, 205, D_MODEL, dtype=torch.float64)
    whole, last = layer(x)
    outputs, state = [], None
    for piece in x.split([1, 1, 62, 64, 0, 3, 74], 1):
        y, state = layer(piece, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(tuple(state), tuple(last), rtol=1e-12, atol=1e-12)


def test_a_step_sees_its_window_and_no_further():
    layer = GateLoopAttention(D_MODEL, window=4).double()
    x = torch.randn(1, 12, D_MODEL, dtype=torch.float64)
    changed = x.clone()
    changed[:, 5] += 1
    differs = (layer(x)[0] - layer(changed)[0]).abs().amax((0, 2)) > 1e-9
    assert differs.tolist() == [5 <= n <= 8 for n in range(12)]


def test_the_state_is_what_the_next_step_sees():
    layer = GateLoopAttention(D_MODEL, window=5, n_heads=2, d_v=6)
    x = torch.randn(3, 70, D_MODEL)
    _, state = layer(x)
    assert isinstance(state, GateLoopAttentionState)
    assert [tuple(t.shape) for t in state] == [(3, 4, 2, 4), (3, 4, 2, 3), (3, 4, 2, 4)]
    assert [t.dtype for t in state] == [torch.float32, torch.float32, torch.complex64]
    torch.testing.assert_close(state.values.flatten(2), layer.qkv(x)[:, -4:, 16:])
    assert sum(t.untyped_storage().nbytes() for t in state) == states.n_bytes(state), "it holds on to nothing else"
    assert layer(x[:, :3])[1].keys.shape[1] == 3
    assert GateLoopAttention(D_MODEL, window=1)(x)[1].keys.shape[1] == 0
