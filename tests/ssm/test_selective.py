"""The selective scan against a plain loop, at once and in pieces, and the step sizes at the start."""

import math

import pytest
import torch
from torch.nn import functional

from recurra.ssm import selective
from recurra.ssm.selective import inverse_softplus_of_steps, selective_scan

B, L, D, N = 2, 11, 3, 4


def draw() -> list[torch.Tensor]:
    """x, step, a, b, c and h0."""
    shapes = (B, L, D), (B, L, D), (D, N), (B, L, N), (B, L, N), (B, N, D)
    x, step, a, b, c, h0 = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [tensor.requires_grad_() for tensor in (x, step.exp(), -a.exp(), b, c, h0)]


def by_a_loop(x, step, a, b, c, h0):
    outputs, h = [], h0.transpose(1, 2)  # (B, D, N), as the paper writes it
    for t in range(x.shape[1]):
        delta = step[:, t, :, None]
        h = torch.exp(delta * a) * h + delta * b[:, t, None] * x[:, t, :, None]
        outputs.append((h * c[:, t, None]).sum(-1))
    return torch.stack(outputs, 1), h.transpose(1, 2)


@pytest.mark.parametrize("piece", [None, 1, 4, 10])
def test_it_is_its_recurrence_outputs_state_and_gradients(piece, monkeypatch):
    if piece:
        monkeypatch.setattr(selective, "MOST_AT_ONCE", 0)
        monkeypatch.setattr(selective, "PIECE", piece * B * D * N + 1)
    inputs = draw()
    found, expected = selective_scan(*inputs), by_a_loop(*inputs)
    weights = [torch.randn_like(part) for part in expected]
    gradients = [
        torch.autograd.grad(sum((w * part).sum() for w, part in zip(weights, parts)), inputs)
        for parts in (found, expected)
    ]
    with torch.no_grad():
        without = selective_scan(*inputs)
    for one, other in zip((*found, *without, *gradients[0]), (*expected, *expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_pieces_keep_no_states_for_the_backward_pass(monkeypatch):
    kept = []
    for most in (selective.MOST_AT_ONCE, 0):
        monkeypatch.setattr(selective, "MOST_AT_ONCE", most)
        monkeypatch.setattr(selective, "PIECE", 4 * B * D * N)
        sizes = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, sizes=sizes: sizes.update({tensor.data_ptr(): tensor.numel()}) or tensor, lambda kept: kept
        )
        with hooks:
            y, _ = selective_scan(*draw())
        kept.append(max(sizes.values(), default=0))
        y.sum().backward()
    assert kept[0] == B * L * D * N
    assert kept[1] < B * L * D * N / 2


def test_a_step_of_0_lets_the_state_pass():
    x, step, a, b, c, h0 = draw()
    _, h = selective_scan(x, torch.zeros_like(step), a, b, c, h0)
    assert torch.equal(h, h0)


def test_steps_are_log_uniform_behind_softplus():
    step = functional.softplus(inverse_softplus_of_steps(20_000, 0.001, 0.1).double()).log10()
    assert step.min().item() == pytest.approx(-3, abs=0.001)
    assert step.max().item() == pytest.approx(-1, abs=0.001)
    assert step.mean().item() == pytest.approx(-2, abs=0.02)
    assert step.std().item() == pytest.approx(2 / math.sqrt(12), rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "message"), [((0.0, 1.0), "a number above 0"), ((0.2, 0.1), "at most max_step = 0.1")]
)
def test_bad_step_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=f"min_step is {sizes[0]}; expected {message}"):
        inverse_softplus_of_steps(3, *sizes)
