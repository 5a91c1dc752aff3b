"""What comes in from outside is checked: another state, or another input, is refused in words, and never read."""

from typing import NamedTuple

import jaxtyping
import pytest
import torch
from tests.contracts.conftest import of_each_kind
from torch import Tensor

from recurra import state as states

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


class ForeignState(NamedTuple):
    """The state of no module."""

    h: Tensor


@pytest.fixture(autouse=True)
def _own_checks(monkeypatch):
    """The library's own checks are asked, which the run-time shape checks would forestall."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def left_by(case, module, batch=2, length=6):
    """A state from the middle of a stream, in memory of its own."""
    with torch.no_grad():
        return states.map_tensors(Tensor.clone, module(case.draw(batch, length))[1])


def changed(state, number, change):
    """The state with one of its tensors changed."""
    counter = iter(range(10**6))
    return states.map_tensors(lambda tensor: change(tensor) if next(counter) == number else tensor, state)


def refuses(case, module, state, error, *words):
    """The module refuses `state` for two streams, in a sentence that says what came and what was expected."""
    owner, x = getattr(module, "model", module), case.draw(2, 3)
    for ask in (lambda: module(x, state), lambda: owner.require_state(state, 2)):
        with pytest.raises(error) as caught:
            ask()
        message = str(caught.value)
        assert "; expected " in message
        assert message.startswith("state")
        for word in words:
            assert word in message


@of_each_kind
def test_states_of_another_form(case, module):
    """Of another batch, size, rank, type or device, in all of the state or in one of its tensors."""
    for batch in (0, 1, 3):
        refuses(case, module, left_by(case, module, batch), ValueError, "on cpu")
    state, here = left_by(case, module), f"on {torch.get_default_device().type}"
    narrower = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    for number, tensor in enumerate(states.tensors(state)):
        dtype, wider = narrower[tensor.dtype], (*tensor.shape[:-1], tensor.shape[-1] + 1)
        for wrong, *words in (
            (tensor[:1], str((1, *tensor.shape[1:]))),
            (tensor.new_zeros(wider), str(wider)),
            (tensor[..., None], str((*tensor.shape, 1))),
            (tensor.to(dtype), str(dtype).removeprefix("torch.")),
            (tensor.to("meta"), "on meta", here),
        ):
            refuses(case, module, changed(state, number, lambda _: wrong), ValueError, *words)  # noqa: B023
        refuses(case, module, changed(state, number, lambda _: None), (ValueError, TypeError), "None")


@of_each_kind
def test_another_modules_state(case, module):
    state = left_by(case, module)
    refuses(case, module, ForeignState(*list(states.tensors(state))[:1]), TypeError, "a ForeignState")
    for wrong, word in ((tuple(state), "a tuple"), (list(state), "a list"), ("abc", "a str")):
        refuses(case, module, wrong, TypeError, word)
    refuses(case, module, next(states.tensors(state)), TypeError)
    if hasattr(state, "layers"):
        first, *others = state.layers
        foreign = ForeignState(next(states.tensors(first)))
        for layers, error, word in (
            (state.layers[:-1], ValueError, f"{len(others)} states"),
            ((*state.layers, first), ValueError, f"{len(others) + 2} states"),
            ((None, *others), ValueError, "None"),
            ((foreign, *others), TypeError, "a ForeignState"),
        ):
            refuses(case, module, state._replace(layers=layers), error, word)


@of_each_kind
def test_another_state_with_lengths(case, module):
    if not case.takes_no_steps:
        return
    state = left_by(case, module)
    mask, borders = torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 2, 6])
    for wrong in (left_by(case, module, 3), tuple(state), changed(state, 0, lambda tensor: tensor[..., None])):
        with pytest.raises((ValueError, TypeError), match=r"state.*; expected "):
            module(case.draw(2, 3), wrong, mask=mask)
        with pytest.raises((ValueError, TypeError), match=r"state.*; expected "):
            module(case.draw(1, 6), wrong, cu_seqlens=borders)


def test_a_state_may_lie_in_memory_anyhow(case, module):
    """Expanded, transposed or cut out of a larger tensor: strides and offsets do not matter."""
    x, state = case.draw(2, 5), states.select(left_by(case, module), torch.tensor([0, 0]))
    leaves = list(module.parameters())

    def run(entering):
        y, last = module(x, entering)
        flat = [y, *states.tensors(last)]
        loss = sum(tensor.abs().square().sum() for tensor in flat)
        return flat + list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))

    def cut_out(tensor):
        larger = tensor.new_full([size + 3 for size in tensor.shape], torch.nan)
        inside = larger[tuple(slice(1, size + 1) for size in tensor.shape)]
        return inside.copy_(tensor)

    expected = run(state)
    for move in (
        lambda tensor: tensor[:1].expand_as(tensor),
        lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1),
        cut_out,
    ):
        for one, other in zip(run(states.map_tensors(move, state)), expected, strict=True):
            torch.testing.assert_close(one, other, **CLOSE)


def test_a_last_state_owns_its_memory(case, module):
    """It does not keep the sequence alive: no larger storage hangs on it."""
    for length in (1, 4, 9, 17):
        _, state = module(case.draw(3, length))
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in states.tensors(state)}
        assert sum(storage.nbytes() for storage in storages.values()) <= states.n_bytes(state)


def test_a_last_state_is_not_written_to_by_later_calls(case, module):
    _, state = module(case.draw(2, 6))
    before = [tensor.detach().clone() for tensor in states.tensors(state)]
    for entering in (state, None, state):
        y, _ = module(case.draw(2, 7), entering)
        y.sum().backward(retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(before, states.tensors(state), strict=True))


def test_the_initial_state_is_the_start(case, module):
    x = case.draw(2, 7)
    owner = getattr(module, "model", module)
    fresh, given = module(x), module(x, owner.initial_state(2))
    torch.testing.assert_close(given[0], fresh[0], **CLOSE)
    for one, other in zip(states.tensors(given[1]), states.tensors(fresh[1]), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    owner.require_state(given[1], 2)
    owner.require_state(owner.initial_state(3), 3)


@of_each_kind
def test_another_input(case, module):
    x = case.draw(2, 6)
    if x.is_floating_point() and x.dim() == 3:
        wrongs, name = (x[0], x[..., :-1], x.long(), x.to(torch.complex128), "abc", None), "x is "
    elif x.dim() == 2:
        wrongs, name = (x[0], x[..., None], x.double(), x.bool(), "abc", None), "tokens is "
    else:
        return
    for wrong in wrongs:
        with pytest.raises((TypeError, ValueError), match="; expected ") as caught:
            module(wrong)
        assert str(caught.value).startswith(name)
