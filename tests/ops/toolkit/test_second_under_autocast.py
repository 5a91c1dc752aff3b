"""Gradients that are differentiated again go through plain torch; autocast must not make its products bfloat16."""

import pytest
import torch

from recurra import gate_loop
from recurra.layers.convolution import shifted_products
from recurra.layers.cross_entropy import cross_entropy
from recurra.ops.cells.gru import GRUCell, HiddenWeights, gru_after, gru_sequence


def draw(*shape):
    return torch.randn(shape, requires_grad=True)


def by_chunks():
    inputs = [draw(1, 64, 2, 16) for _ in "qkv"]
    a = torch.rand(1, 64, 2, 1)
    return lambda *qkv: gate_loop(*qkv, a)[0], inputs


def by_a_gru():
    cell = GRUCell(3, 7)
    weights = cell.recurrent_weights()
    return lambda projected, h: gru_sequence(cell, projected, h, weights)[0], [draw(2, 5, 21), draw(2, 7)]


def by_another_gru():
    weight, bias = draw(21, 7), draw(21)
    return lambda *x: gru_after(*x, HiddenWeights(weight, bias))[0], [draw(2, 5, 21), draw(2, 7)]


def by_a_convolution():
    return shifted_products, [draw(2, 5, 6), draw(2, 3, 6), draw(4, 6), draw(6)]


def by_losses():
    return lambda logits: cross_entropy(logits, torch.arange(5)), [draw(5, 9)]


@pytest.mark.parametrize("build", [by_chunks, by_a_gru, by_another_gru, by_a_convolution, by_losses])
def test_they_are_those_that_the_kernel_gives(build):
    function, inputs = build()
    with torch.autocast("cpu", torch.bfloat16):
        loss = function(*inputs).square().sum()
        once = torch.autograd.grad(loss, inputs, retain_graph=True)
        again = torch.autograd.grad(loss, inputs, create_graph=True)
    for one, other in zip(once, again):
        torch.testing.assert_close(other.detach(), one, rtol=1e-4, atol=1e-5)
