"""HGRN2 against its equations, step by step."""

import pytest
import torch
from tests.mixers.stepwise import require_same

from recurra.mixers.hgrn2 import HGRN2, HGRN2State

D_MODEL = 6
OPTIONS = [{}, {"n_heads": 3}, {"n_heads": 2, "lower_bound": 0.75}, {"n_heads": 6, "lower_bound": 0.2}]


def by_a_loop(layer: HGRN2, x: torch.Tensor, state: HGRN2State):
    """Section 3 with the outer product in every head, and queries scaled as in flash-linear-attention."""
    w_o, w_i = layer.output_input.weight.chunk(2)
    outputs, s = [], list(state.h.unbind(1))
    for step in x.unbind(1):
        o, i = step @ w_o.T, step @ w_i.T
        o = o * torch.sigmoid(o) * (D_MODEL / layer.n_heads) ** -0.5
        f = layer.lower_bound + (1 - layer.lower_bound) * torch.sigmoid(step @ layer.forget.weight.T)
        o, i, f = (part.chunk(layer.n_heads, -1) for part in (o, i, f))
        for h in range(layer.n_heads):
            s[h] = f[h][:, :, None] * s[h] + (1 - f[h])[:, :, None] * i[h][:, None, :]
        y = torch.cat([(o[h][:, None] @ s[h])[:, 0] for h in range(layer.n_heads)], -1)
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
        outputs.append(y @ layer.output_projection.weight.T)
    return torch.stack(outputs, 1), HGRN2State(torch.stack(s, 1))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_state_and_gradients_are_the_papers(options):
    layer = HGRN2(D_MODEL, **options).double()
    x, start = torch.randn(2, 11, D_MODEL, dtype=torch.float64), layer.initial_state(2)
    require_same(layer, by_a_loop, x, HGRN2State(torch.randn_like(start.h)))


def test_a_small_key_keeps_its_digits():
    """1 - f at f = 1 - 1e-13: 0 if it were formed as a difference in float32."""
    layer, x = HGRN2(D_MODEL), torch.ones(1, 1, D_MODEL)
    with torch.no_grad():
        layer.forget.weight.fill_(5.0)  # 30 before the sigmoid
    _, state = layer(x)
    i = layer.output_input(x)[0, 0, D_MODEL:]
    expected = torch.sigmoid(torch.tensor(-30.0)) * i.expand(D_MODEL, D_MODEL)
    torch.testing.assert_close(state.h[0, 0], expected, rtol=1e-5, atol=0)
