"""Lightning attention: the sum that its docstring says, and the decays that MiniMax-01 starts with."""

import pytest
import torch
from tests.gradients import require_same_gradients
from torch.nn import functional

from recurra.mixers.lightning_attention import LightningAttention


@pytest.mark.parametrize("options", [{"n_heads": 3}, {"n_heads": 2, "d_head": 5, "norm_epsilon": 0.3}], ids=str)
def test_it_is_the_sum_and_so_are_its_gradients(options):
    torch.manual_seed(0)
    layer, x = (
        LightningAttention(12, **options).double(),
        torch.randn(2, 11, 12, dtype=torch.float64, requires_grad=True),
    )
    layer.norm.weight.data.uniform_(0.5, 1.5)
    heads = functional.silu(x @ layer.qkv.weight.T).unflatten(-1, (3, layer.n_heads, -1))
    decay, steps = torch.exp(-torch.exp(layer.log_rate)), []
    for n in range(x.shape[1]):
        past = [
            decay[:, None] ** (n - m) * (heads[:, n, 0] * heads[:, m, 1]).sum(-1, keepdim=True) * heads[:, m, 2]
            for m in range(n + 1)
        ]
        steps.append(sum(past).flatten(1))
    y = torch.stack(steps, 1)
    y = y / (y.square().mean(-1, keepdim=True) + layer.norm.epsilon).sqrt() * layer.norm.weight
    expected = (torch.sigmoid(x @ layer.gate_projection.weight.T) * y) @ layer.output_projection.weight.T
    first, state = layer(x[:, :4])
    found = torch.cat([first, layer(x[:, 4:], state)[0]], 1)
    require_same_gradients(found, expected, [x, *layer.parameters()], 1e-11)


def test_decays_start_with_the_slopes_of_the_first_layer():
    rates = LightningAttention(16, n_heads=8).log_rate.exp()
    torch.testing.assert_close(rates, 0.5 ** torch.arange(1.0, 9.0), rtol=1e-6, atol=0)
