"""Mamba-3 against its recurrence step by step, with complex numbers in the place of rotations."""

import math

import pytest
import torch
from tests.mixers.stepwise import require_same
from torch.nn import functional

from recurra.mixers.mamba3 import Mamba3, Mamba3State, _heavy_tailed, _of_next_steps

D_MODEL, D_STATE, N_HEADS = 6, 8, 4


def build(**options) -> Mamba3:
    """A layer whose weights all differ, with steps that decay and turn far."""
    options = {"d_state": D_STATE, "n_heads": N_HEADS, "n_groups": 2, "min_step": 0.1, "max_step": 2.0, **options}
    layer = Mamba3(D_MODEL, **options).double()
    layer.softplus_decay = options.get("decay_activation") == "softplus"
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return layer


def projected(layer: Mamba3, step: torch.Tensor) -> tuple[torch.Tensor, ...]:
    sizes = [2 * D_MODEL, 2 * D_MODEL, *2 * [layer.n_groups * D_STATE], *3 * [N_HEADS], layer.n_pairs]
    return (step @ layer.input_projection.weight.t()).split(sizes, -1)


def to_complex(x: torch.Tensor, n_pairs: int) -> torch.Tensor:
    """Rows (B, n, ...) as complex numbers: pairs that turn, then the others as they are."""
    pairs = x[:, : 2 * n_pairs].unflatten(1, (n_pairs, 2))
    rest = x[:, 2 * n_pairs :]
    return torch.cat([torch.complex(pairs[:, :, 0], pairs[:, :, 1]), rest.to(torch.complex128)], 1)


def to_real(x: torch.Tensor, n_pairs: int) -> torch.Tensor:
    return torch.cat([torch.view_as_real(x[:, :n_pairs]).movedim(-1, 2).flatten(1, 2), x[:, n_pairs:].real], 1)


def decay_rate(layer: Mamba3, x: torch.Tensor) -> torch.Tensor:
    """-A: heavy_tail_activation of the authors' code, or softplus as before it."""
    if layer.softplus_decay:
        return functional.softplus(x)
    return torch.where(x >= 0, 1 + x, 1 / (1 - x.clamp(max=0)))


def by_a_loop(layer: Mamba3, x: torch.Tensor, state: Mamba3State) -> tuple[torch.Tensor, Mamba3State]:
    """One step and one head at a time: a complex transition for each pair of rows that turns."""
    w, n = dict(layer.named_parameters()), layer.n_pairs
    h, kept_b, kept_u = (list(part.unbind(1)) for part in state)
    h = [to_complex(one, n) for one in h]
    outputs = []
    for step in x.unbind(1):
        z, u, b, c, delta, decay, weight, theta = projected(layer, step)
        still = theta.new_zeros(len(theta), D_STATE - 2 * n)
        read = []
        for head, u_head in enumerate(u.chunk(N_HEADS, -1)):
            group = head * layer.n_groups // N_HEADS
            keys = []
            for name, part in (("b", b), ("c", c)):
                part = part.chunk(layer.n_groups, -1)[group]
                part = part / (part.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}_norm.weight"]
                keys.append(part + w[f"{name}_bias"][head])
            size = functional.softplus(delta[:, head, None] + w["step_bias"][head])
            angle = torch.cat([math.pi * torch.tanh(theta), still], -1) * size
            alpha = torch.exp(torch.complex(-decay_rate(layer, decay[:, head, None]) * size, -angle))[..., None]
            share = torch.sigmoid(weight[:, head, None])
            before, now = (
                (factor * key)[:, :, None] * value[:, None]
                for factor, key, value in (
                    ((1 - share) * size, kept_b[head], kept_u[head]),
                    (share * size, keys[0], u_head),
                )
            )
            h[head] = alpha * (h[head] + to_complex(before, n)) + to_complex(now, n)
            y = (to_complex(keys[1], n).conj()[:, :, None] * h[head]).real.sum(1)
            kept_b[head], kept_u[head] = keys[0], u_head
            read.append(y + w["skip"][head] * u_head)
        outputs.append((torch.cat(read, -1) * functional.silu(z)) @ w["output_projection.weight"].t())
    h = torch.stack([to_real(one, n) for one in h], 1)
    return torch.stack(outputs, 1), Mamba3State(h, torch.stack(kept_b, 1), torch.stack(kept_u, 1))


@pytest.mark.parametrize("options", [{}, {"rope_fraction": 1.0, "n_groups": 1, "decay_activation": "softplus"}])
@pytest.mark.parametrize("length", [1, 9])
def test_it_is_its_recurrence_outputs_state_and_gradients(options, length):
    layer = build(**options)
    state = Mamba3State(*map(torch.randn_like, layer.initial_state(2)))
    require_same(layer, by_a_loop, torch.randn(2, length, D_MODEL, dtype=torch.float64), state)


def test_the_decay_has_the_slope_1_at_0():
    """Zeros are common: x = 0 gives them."""
    x = torch.tensor([-1e-6, 0.0, 1e-6], dtype=torch.float64, requires_grad=True)
    y = _heavy_tailed(x)
    torch.testing.assert_close(y.detach(), 1 + x.detach(), rtol=0, atol=1e-11)
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, torch.ones_like(x), rtol=0, atol=3e-6)


def test_it_starts_as_published():
    layer = Mamba3(1024, d_state=4)
    assert (layer.n_heads, Mamba3(12).n_heads) == (32, 1)  # of 64 channels, but at least one
    for ones in (layer.b_bias, layer.c_bias, layer.b_norm.weight, layer.c_norm.weight, layer.skip):
        assert (ones == 1).all()
    steps = functional.softplus(layer.step_bias)
    assert 0.00099 < steps.min() < steps.max() < 0.101


def test_the_transition_is_that_of_the_recurrence():
    layer, x = build(), torch.randn(2, 1, D_MODEL, dtype=torch.float64)
    magnitude, phase = layer.transition(x)
    state = layer.initial_state(2)._replace(h=torch.randn(2, N_HEADS, D_STATE, 3, dtype=torch.float64))
    carried = layer(x, state)[1].h - layer(x)[1].h
    a = torch.polar(magnitude, phase).view(2 * N_HEADS, layer.n_pairs, 1)
    n, before, after = layer.n_pairs, state.h.flatten(0, 1), carried.flatten(0, 1)
    expected = a * to_complex(before, n)[:, :n]
    torch.testing.assert_close(to_complex(after, n)[:, :n], expected, rtol=1e-10, atol=1e-12)


def test_next_steps_pass_over_padding():
    mask = torch.tensor([[0, 1, 0, 1, 0], [1, 1, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()
    values = (torch.arange(1.0, 16.0).view(3, 5) * mask)[..., None, None]
    expected = torch.tensor([[2.0, 2, 4, 4, 1, 1], [6, 7, 10, 10, 10, 1], [1, 1, 1, 1, 1, 1]])
    assert torch.equal(_of_next_steps(values, mask, 1.0)[..., 0, 0], expected)
