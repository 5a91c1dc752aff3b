"""Mamba-2 against its recurrence step by step. tests/convert compares it with transformers'."""

import pytest
import torch
from tests.mixers.stepwise import require_same
from torch.nn import functional

from recurra.mixers.mamba2 import Mamba2, Mamba2State
from recurra.mixers.mamba2_attention import Mamba2Attention

D_MODEL, D_STATE = 6, 5


def build(**options) -> Mamba2:
    """A layer whose weights all differ."""
    layer = Mamba2(D_MODEL, **{"d_state": D_STATE, "n_heads": 4, "n_groups": 2, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


def by_a_loop(layer: Mamba2, x: torch.Tensor, state: Mamba2State) -> tuple[torch.Tensor, Mamba2State]:
    """One step and one head at a time."""
    w, d_inner, n_heads, n_groups = dict(layer.named_parameters()), 2 * D_MODEL, layer.n_heads, layer.n_groups
    h, seen, outputs = list(state.h.unbind(1)), list(state.inputs.unbind(1)), []
    for step in x.unbind(1):
        z, mixed, delta = (step @ w["input_projection.weight"].t()).split(
            [d_inner, d_inner + 2 * n_groups * D_STATE, n_heads], -1
        )
        seen.append(mixed)
        taps = w["convolution.weight"][:, 0].unbind(1)
        mixed = functional.silu(sum(tap * u for tap, u in zip(taps, seen[-4:])) + w["convolution.bias"])
        u, b, c = mixed.split([d_inner, n_groups * D_STATE, n_groups * D_STATE], -1)
        read = []
        for head, u_head in enumerate(u.chunk(n_heads, -1)):
            group = head * n_groups // n_heads
            delta_head = torch.log1p(torch.exp(delta[:, head, None, None] + w["step_bias"][head]))
            write = delta_head * b.chunk(n_groups, -1)[group][:, :, None] * u_head[:, None]
            h[head] = torch.exp(-delta_head * torch.exp(w["log_decay"][head])) * h[head] + write
            y = (c.chunk(n_groups, -1)[group][:, :, None] * h[head]).sum(1)
            read.append(y + w["skip"][head] * u_head)
        gated = torch.cat(read, -1) * functional.silu(z)
        normed = [part / (part.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() for part in gated.chunk(n_groups, -1)]
        outputs.append((torch.cat(normed, -1) * w["norm.weight"]) @ w["output_projection.weight"].t())
    return torch.stack(outputs, 1), Mamba2State(torch.stack(h, 1), torch.stack(seen[-3:], 1))


@pytest.mark.parametrize("options", [{}, {"n_heads": 3, "n_groups": 1}])
@pytest.mark.parametrize("length", [2, 9])
def test_it_is_its_recurrence_outputs_state_and_gradients(options, length):
    layer = build(**options)
    state = Mamba2State(*map(torch.randn_like, layer.initial_state(2)))
    require_same(layer, by_a_loop, torch.randn(2, length, D_MODEL, dtype=torch.float64), state)


@pytest.mark.parametrize("norm", ["before", None])
def test_other_places_of_the_norm_and_other_widths(norm):
    """What leaves the layer, by the layer whose norm is last: of a gate of 1 and a norm undone."""
    layer = build(norm=norm, d_inner=8, norm_epsilon=1e-3)
    x, seen = torch.randn(2, 5, D_MODEL, dtype=torch.float64), []
    layer.output_projection.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    layer(x)
    with torch.no_grad():
        z = layer.input_projection(x)[..., :8]
        layer.input_projection.weight[:8] = 0.0  # a gate of SiLU(0) = 0 would hide what it gates
        plain = layer._projected
        layer._projected = lambda x: (torch.full_like(z, 30.0), *plain(x)[1:])
        layer.norm, norm_before = None, layer.norm
        layer(x)
    y = seen[1] / functional.silu(torch.tensor(30.0, dtype=torch.float64))
    if norm_before is not None:
        groups = y.unflatten(-1, (2, 4))
        y = (groups / (groups.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()).flatten(-2) * norm_before.weight
    torch.testing.assert_close(seen[0], y * functional.silu(z), rtol=1e-10, atol=1e-11)


def test_a_lower_limit_of_steps_is_kept_but_at_padding():
    layer, x = build(least_step=0.9), torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True, True]] * 2)
    steps = layer._step_sizes(layer._projected(x)[2], mask)
    assert steps[mask].min() == 0.9
    assert not steps[:, 2].any()


def test_beside_attention_it_adds_up():
    layer = Mamba2Attention(D_MODEL, d_state=D_STATE, n_mamba_heads=2, n_heads=3, window=4).double()
    x = torch.randn(2, 9, D_MODEL, dtype=torch.float64)
    (y, state), (one, of_mamba), (other, of_attention) = (part(x) for part in (layer, layer.mamba, layer.attention))
    torch.testing.assert_close(y, one + other, rtol=1e-12, atol=1e-13)
    assert all(torch.equal(*pair) for pair in zip(state, (*of_mamba, *of_attention), strict=True))


def test_it_starts_as_published():
    layer = Mamba2(1024, d_state=1)
    assert (layer.n_heads, Mamba2(12, d_state=1).n_heads) == (32, 1)  # of 64 channels, but at least one
    decays = Mamba2(1000, d_state=1, n_heads=1000).log_decay.exp()
    assert decays.min().item() == pytest.approx(1, abs=0.1)
    assert decays.max().item() == pytest.approx(16, abs=0.1)
    assert decays.mean().item() == pytest.approx(8.5, abs=0.6)
    assert (layer.skip == 1).all()
    steps = functional.softplus(layer.step_bias)
    assert 0.00099 < steps.min() < steps.max() < 0.101
