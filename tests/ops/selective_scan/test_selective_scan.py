"""The selective scan against a plain loop, at once, in pieces and by its kernels."""

import pytest
import torch

from recurra.ops.selective_scan import reference as plain
from recurra.ops.selective_scan.operator import _selective_scan, selective_scan
from recurra.ops.selective_scan.reference import at_once

B, L, D, N = 2, 11, 3, 4


def draw(batch=B, length=L, row=D, modes=N) -> list[torch.Tensor]:
    """x, step, a, b, c and h0, in float64: the kernels take none of them."""
    narrow, wide = (batch, length, modes), (batch, length, row)
    shapes = wide, wide, (row, modes), narrow, narrow, (batch, modes, row)
    x, step, a, b, c, h0 = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [tensor.requires_grad_() for tensor in (x, step.exp(), -a.exp(), b, c, h0)]


def by_kernels(*inputs):
    return _selective_scan(*inputs, "auto")[:2]


def by_a_loop(x, step, a, b, c, h0):
    outputs, h = [], h0.transpose(1, 2)  # (B, D, N), as the paper writes it
    for t in range(x.shape[1]):
        delta = step[:, t, :, None]
        h = torch.exp(delta * a) * h + delta * b[:, t, None] * x[:, t, :, None]
        outputs.append((h * c[:, t, None]).sum(-1))
    return torch.stack(outputs, 1), h.transpose(1, 2)


SIZES = [(2, 37, 83, 5), (1, 16, 64, 16), (3, 50, 16, 1), (1, 2, 7, 3), (2, 33, 130, 16), (1, 1, 5, 2)]


def gradients_of(found, inputs):
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part.dtype) for part in found]
    return torch.autograd.grad(sum((w * part).sum() for w, part in zip(weights, found)), inputs)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernels_are_the_plain_operations(sizes):
    inputs = [tensor.detach().float().requires_grad_() for tensor in draw(*sizes)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found, expected = by_kernels(*inputs), at_once(*exact)
    with torch.no_grad():
        without = by_kernels(*inputs)
    found = (*found, *without, *gradients_of(found, inputs))
    for place, (one, other) in enumerate(
        zip(found, (*expected, *expected, *gradients_of(expected, exact)), strict=True)
    ):
        # the gradients of b and c are sums over channels, of terms of order 1, and may cancel
        least = 1.0 if place in (7, 8) else 0.0
        assert (one.double() - other).abs().max() <= 1e-6 * other.abs().max().clamp_min(least)


@pytest.mark.parametrize(("place", "gradient"), [(3, 4), (4, 3)], ids=["b", "c"])
def test_infinities_reach_no_gradient_from_channels_that_are_not_there(place, gradient):
    inputs = [tensor.detach().float() for tensor in draw(1, 3, 5, 2)]
    inputs[0].abs_()  # so that all infinities have one sign
    inputs[place][0, 1, 0] = torch.inf
    inputs = [tensor.requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    (found,) = torch.autograd.grad(by_kernels(*inputs)[0].sum(), inputs[gradient])
    (expected,) = torch.autograd.grad(at_once(*exact)[0].sum(), exact[gradient])
    assert expected.isinf().any()
    torch.testing.assert_close(found.double(), expected, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("piece", [None, 1, 4, 10])
def test_it_is_its_recurrence_outputs_state_and_gradients(piece, monkeypatch):
    if piece:
        monkeypatch.setattr(plain, "MOST_AT_ONCE", 0)
        monkeypatch.setattr(plain, "PIECE", piece * B * D * N + 1)
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
    for most in (plain.MOST_AT_ONCE, 0):
        monkeypatch.setattr(plain, "MOST_AT_ONCE", most)
        monkeypatch.setattr(plain, "PIECE", 4 * B * D * N)
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


@pytest.mark.parametrize("number", range(1, 6))
def test_tensors_on_several_devices_are_refused(number):
    inputs = list(draw())
    inputs[number] = inputs[number].to("meta")
    with pytest.raises(ValueError, match=f"^{('step', 'a', 'b', 'c', 'h0')[number - 1]} is .*expected a tensor on cpu"):
        selective_scan(*inputs)
