"""Mamba against its recurrence step by step. tests/convert compares it with transformers'."""

import pytest
import torch
from tests.mixers.stepwise import first_mixer, require_same
from torch.nn import functional

from recurra.mixers.mamba import Mamba, MambaState

D_MODEL = 6


def build(**options) -> Mamba:
    """A layer whose weights all differ: the skip and the eigenvalues start alike in every channel."""
    layer = Mamba(D_MODEL, **{"d_state": 5, "dt_rank": 2, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


NORMS = ("step", "b", "c")


NORMALISED = {"selection_norm": 1e-2}


def normalised(layer: Mamba, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """x by its root mean square, where the layer normalises."""
    if isinstance(layer.b_norm, torch.nn.Identity):
        return x
    normal = x / (x.pow(2).mean(-1, keepdim=True) + NORMALISED["selection_norm"]).sqrt()
    return normal if scale is None else normal * scale


def by_a_loop(layer: Mamba, x: torch.Tensor, state: MambaState) -> tuple[torch.Tensor, MambaState]:
    """Algorithm 2, one step and one channel's modes (B, d_inner, N) at a time."""
    w, d_inner = dict(layer.named_parameters()), layer.skip.numel()
    h, seen, outputs = state.h.transpose(1, 2), list(state.inputs.unbind(1)), []
    for step in x.unbind(1):
        u, z = (functional.linear(step, part) for part in w["input_projection.weight"].split(d_inner))
        seen.append(u)
        taps = w["convolution.weight"][:, 0].unbind(1)
        u = functional.silu(sum(tap * u for tap, u in zip(taps, seen[-len(taps) :])) + w["convolution.bias"])
        parts = (u @ w["selection.weight"].t()).split([layer.dt_rank, layer.d_state, layer.d_state], -1)
        narrow, b, c = (normalised(layer, part, w.get(f"{name}_norm.weight")) for name, part in zip(NORMS, parts))
        delta = torch.log1p(torch.exp(narrow @ w["step_projection.weight"].t() + w["step_bias"]))[..., None]
        a = -torch.exp(w["log_decay"])
        h = torch.exp(delta * a) * h + delta * b[:, None] * u[..., None]
        y = (h * c[:, None]).sum(-1) + w["skip"] * u
        outputs.append((y * functional.silu(z)) @ w["output_projection.weight"].t())
    return torch.stack(outputs, 1), MambaState(h.transpose(1, 2), torch.stack(seen[len(seen) - len(taps) + 1 :], 1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"expand": 1, "d_conv": 2},
        NORMALISED,
        {**NORMALISED, "selection_scales": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [2, 9])
def test_it_is_its_recurrence_outputs_state_and_gradients(options, length):
    layer = build(**options)
    state = MambaState(*map(torch.randn_like, layer.initial_state(2)))
    require_same(layer, by_a_loop, torch.randn(2, length, D_MODEL, dtype=torch.float64), state)


@pytest.mark.parametrize("in_a_model", [False, True])
def test_it_starts_as_published(in_a_model):
    layer = first_mixer("mamba", 40, d_state=3) if in_a_model else Mamba(40, d_state=3)
    assert layer.step_projection.weight.shape == (80, 3)  # d_model / 16, rounded up
    assert layer.step_projection.weight.abs().max().item() == pytest.approx(3**-0.5, rel=0.05)
    torch.testing.assert_close(layer.log_decay.exp(), torch.tensor([1.0, 2.0, 3.0]).expand(80, 3))
    assert (layer.skip == 1).all()
    steps = functional.softplus(layer.step_bias)
    assert 0.00099 < steps.min() < 0.0015
    assert 0.07 < steps.max() < 0.101


@pytest.mark.parametrize(("d_model", "rank"), [(16, 1), (33, 3), (768, 48)])
def test_the_step_has_a_rank_for_every_16_channels(d_model, rank):
    assert Mamba(d_model).dt_rank == rank


def test_the_transition_is_that_of_the_recurrence():
    layer, x = build(), torch.randn(2, 1, D_MODEL, dtype=torch.float64)
    magnitude, phase = layer.transition(x)
    state = layer.initial_state(2)._replace(h=torch.randn(2, 5, 12, dtype=torch.float64))
    carried = layer(x, state)[1].h - layer(x)[1].h
    torch.testing.assert_close(magnitude.view(2, 12, 5).transpose(1, 2) * state.h, carried, rtol=1e-10, atol=1e-12)
    assert not phase.any()


def test_normalised_selections_train_under_autocast():
    layer, x = Mamba(D_MODEL, selection_norm=1e-6, selection_scales=True), torch.randn(2, 9, D_MODEL)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
    y.float().square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in layer.parameters())
    torch.testing.assert_close(y.float(), layer(x)[0], rtol=0.1, atol=0.02)
