"""States as values."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from recurra import state as states


class Inner(NamedTuple):
    h: Tensor
    steps: int


class Outer(NamedTuple):
    layers: tuple
    nothing: None


def example() -> Outer:
    return Outer((Inner(torch.arange(6.0).reshape(3, 2), 4), [torch.ones(3)]), None)


def test_map_keeps_the_structure():
    doubled = states.map_tensors(lambda t: t * 2, example())
    assert isinstance(doubled, Outer)
    assert isinstance(doubled.layers[0], Inner)
    assert doubled.layers[0].steps == 4
    assert doubled.nothing is None
    assert torch.equal(doubled.layers[0].h, example().layers[0].h * 2)
    assert isinstance(doubled.layers[1], list)


def test_tensors_are_in_order():
    assert [t.shape for t in states.tensors(example())] == [(3, 2), (3,)]


@pytest.mark.parametrize("index", [torch.tensor([2, 0]), slice(1, 3), torch.tensor([True, False, True])], ids=str)
def test_select(index):
    chosen = states.select(example(), index)
    assert torch.equal(chosen.layers[0].h, example().layers[0].h[index])
    assert chosen.layers[1][0].shape == (2,)


def test_n_bytes():
    assert states.n_bytes(example()) == (6 + 3) * 4
    assert states.n_bytes(None) == 0


def test_detach():
    h = torch.ones(2, requires_grad=True) * 2
    assert not states.detach((h,))[0].requires_grad
    assert h.requires_grad


def test_foreign_content_is_refused():
    with pytest.raises(TypeError, match="it came with str"):
        states.detach(("hidden",))
