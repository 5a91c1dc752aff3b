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


@pytest.mark.parametrize("index", [torch.tensor([2, 0]), slice(1, 3), torch.tensor([True, False, True])], ids=str)
def test_select(index):
    chosen = states.select(example(), index)
    assert torch.equal(chosen.layers[0].h, example().layers[0].h[index])
    assert chosen.layers[1][0].shape == (2,)


@pytest.mark.parametrize("index", [0, torch.tensor(1), [0, 1]], ids=str)
def test_select_refuses_an_index_that_would_lose_the_batch(index):
    with pytest.raises(TypeError, match=r"expected a slice or a tensor of indices: slice\(n, n \+ 1\) takes stream n"):
        states.select(example(), index)


def rows(*numbers: int) -> Outer:
    """A batched state whose tensors tell the row."""
    row = torch.tensor(numbers, dtype=torch.float32)
    return Outer((Inner(row[:, None] * torch.ones(2), 4), [row]), None)


def test_concatenate_puts_streams_side_by_side():
    together = states.concatenate([rows(3), rows(1, 2), rows(7)])
    assert isinstance(together, Outer)
    assert isinstance(together.layers[1], list)
    assert together.layers[0].steps == 4
    assert together.layers[0].h.tolist() == [[3, 3], [1, 1], [2, 2], [7, 7]]
    assert together.layers[1][0].tolist() == [3, 1, 2, 7]
    assert states.concatenate([None, None]) is None


def test_split_is_the_way_back_and_leaves_nothing_behind():
    together = rows(3, 1, 2)
    apart = states.split(together)
    assert [state.layers[1][0].tolist() for state in apart] == [[3], [1], [2]]
    assert all(isinstance(state, Outer) and isinstance(state.layers[0], Inner) for state in apart)
    assert all(tensor.untyped_storage().nbytes() <= 8 for state in apart for tensor in states.tensors(state))
    assert torch.equal(states.concatenate(apart).layers[0].h, together.layers[0].h)


def other_layouts() -> dict[str, object]:
    h, steps = rows(1).layers[0]
    last = rows(1).layers[1]
    return {
        "size": Outer((Inner(h[:, :1], steps), last), None),
        "type": Outer((Inner(h.double(), steps), last), None),
        "number": Outer((Inner(h, 5), last), None),
        "kind-of-number": Outer((Inner(h, 4.0), last), None),  # type: ignore[arg-type]
        "class": Outer(((h, steps), last), None),
        "nothing": None,
    }


@pytest.mark.parametrize("name", ["size", "type", "number", "kind-of-number", "class", "nothing"])
def test_states_of_other_layouts_are_not_concatenated(name):
    other = other_layouts()[name]
    assert states.layout(other) != states.layout(rows(1))
    with pytest.raises(ValueError, match=r"states\[1\] is of another layout; expected that of states\[0\]"):
        states.concatenate([rows(1), other])


def test_states_of_several_layouts_become_one_batch_each():
    other, another = other_layouts()["number"], other_layouts()["nothing"]
    found = states.concatenate_alike([rows(1), other, rows(2), another, another, rows(3)])
    assert [numbers for numbers, _ in found] == [[0, 2, 5], [1], [3, 4]]
    assert found[0][1].layers[1][0].tolist() == [1, 2, 3]
    assert states.layout(found[1][1]) == states.layout(other)
    assert found[2][1] is None
    assert states.concatenate_alike([]) == []


def test_what_cannot_be_put_together_or_taken_apart():
    with pytest.raises(ValueError, match="states is empty"):
        states.concatenate([])
    with pytest.raises(ValueError, match="has no tensor"):
        states.split((3, None))


def test_detach():
    h = torch.ones(2, requires_grad=True) * 2
    assert not states.detach((h,))[0].requires_grad
    assert h.requires_grad


def test_foreign_content_is_refused():
    with pytest.raises(TypeError, match="state holds a str; expected tensors, numbers and None"):
        states.detach(("hidden",))


def two_places():
    """Four streams in one layer's state as any other, in the next with windows of 3, 4, 3 and 4 steps."""
    windows = [(torch.full((1, length, 2), float(row)), length) for row, length in enumerate((3, 4, 3, 4))]
    return Outer((torch.arange(4.0), states.batch(windows)), None)


def test_a_batch_of_streams_at_different_places():
    state = two_places()
    assert isinstance(state.layers[1], states.Ragged)
    assert states.n_streams(state) == states.n_streams(state.layers[1]) == 4
    assert [one.layers[1][1] for one in states.split(state)] == [3, 4, 3, 4]
    assert all(not isinstance(one.layers[1], states.Ragged) for one in states.split(state))
    assert states.n_streams(None) is None
    detached = states.detach(states.map_tensors(lambda tensor: tensor.clone().requires_grad_(), state))
    assert isinstance(detached.layers[1], states.Ragged)
    assert not any(tensor.requires_grad for tensor in states.tensors(detached))


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (torch.tensor([3, 0]), [3, 0]),
        (torch.tensor([True, False, False, True]), [0, 3]),
        (slice(1, 3), [1, 2]),
        (torch.tensor([2, 0, 0]), [2, 0, 0]),
        (slice(0), []),
    ],
)
def test_select_at_different_places(index, rows):
    selected = states.select(two_places(), index)
    assert selected.layers[0].tolist() == rows
    assert states.n_streams(selected.layers[1]) == len(rows)
    for row, one in zip(rows, states.split(selected), strict=True):
        window, length = one.layers[1]
        assert length == (3, 4)[row % 2]
        assert torch.equal(window, torch.full((1, length, 2), float(row)))
    assert isinstance(selected.layers[1], states.Ragged) == (len({row % 2 for row in rows}) > 1)


def test_streams_at_different_places_are_not_concatenated():
    with pytest.raises(ValueError, match=r"states holds a Ragged state; expected .* split them first"):
        states.concatenate([two_places(), two_places()])
