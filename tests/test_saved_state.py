from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from recurra.saved_state import state_from_plain, state_to_plain


class Inner(NamedTuple):
    real: Tensor
    n_steps: int


class Outer(NamedTuple):
    layers: tuple[Inner | None, ...]
    mean: Tensor


class Model(nn.Module):
    """Its state has everything that a state may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.dropout = nn.Dropout()

    def forward(self, tokens: Tensor, state: Outer | None) -> tuple[Tensor, Outer]:
        self.seen_training = self.training
        rows = len(tokens)
        inner = Inner(torch.zeros(rows, 2, dtype=torch.complex64), 1)
        return tokens, Outer((inner, None), self.weight.expand(rows, 2))


@pytest.fixture
def state() -> Outer:
    inner = Inner(torch.randn(3, 2, dtype=torch.complex64), 41)
    return Outer((inner, None), torch.randn(3, 2, requires_grad=True))


def test_a_state_comes_back_with_its_structure_and_values(state):
    model = Model()
    packed = state_to_plain(state)
    restored = state_from_plain(packed, model)
    assert type(packed) is list
    assert type(restored) is Outer
    assert type(restored.layers) is tuple
    assert type(restored.layers[0]) is Inner
    assert restored.layers[1] is None
    assert restored.layers[0].n_steps == 41
    assert torch.equal(restored.layers[0].real, state.layers[0].real)
    assert torch.equal(restored.mean, state.mean)
    assert not restored.mean.requires_grad
    assert model.training
    assert not model.seen_training


def test_no_state_stays_no_state():
    assert state_from_plain(state_to_plain(None), Model()) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[:1],
        lambda packed: [packed[0], packed[1][:2]][::-1],
        lambda packed: [packed[0], packed[1].double()],
        lambda packed: [packed[0], packed[1][None]],
        lambda packed: [packed[0], None],
        lambda packed: [[packed[0][0], packed[1]], packed[1]],
    ],
)
def test_another_models_state_is_refused(state, damage):
    with pytest.raises(ValueError, match="does not fit the model's"):
        state_from_plain(damage(state_to_plain(state)), Model())


def test_the_error_says_where(state):
    packed = state_to_plain(state)
    packed[0][0][0] = packed[0][0][0].real
    with pytest.raises(
        ValueError, match=r"state.layers.0.real is torch.float32 \(3, 2\) against torch.complex64 \(3, 2\)"
    ):
        state_from_plain(packed, Model())
