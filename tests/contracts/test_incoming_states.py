"""What comes in from outside is checked: another state, or another input, is refused in words, and never read."""

from typing import NamedTuple

import jaxtyping
import pytest
import torch
from torch import Tensor

import recurra
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


def tensors_of(state):
    return list(enumerate(states.tensors(state)))


def refuses(case, module, state, error, *words):
    """The module refuses `state` for two streams, in a sentence that says what came and what was expected."""
    with pytest.raises(error) as caught:
        module(case.draw(2, 3), state)
    message = str(caught.value)
    assert "; expected " in message
    assert message.startswith("state")
    for word in words:
        assert word in message


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_another_batch(case, module, batch):
    refuses(case, module, left_by(case, module, batch), ValueError, "on cpu")


def test_one_tensor_of_another_batch(case, module):
    state = left_by(case, module)
    for number, tensor in tensors_of(state):
        wrong = changed(state, number, lambda tensor: tensor[:1])
        refuses(case, module, wrong, ValueError, str((1, *tensor.shape[1:])))


def test_another_size(case, module):
    state = left_by(case, module)
    for number, tensor in tensors_of(state):
        shape = (*tensor.shape[:-1], tensor.shape[-1] + 1)
        refuses(case, module, changed(state, number, lambda tensor: tensor.new_zeros(shape)), ValueError, str(shape))  # noqa: B023


def test_another_rank(case, module):
    state = left_by(case, module)
    for number, tensor in tensors_of(state):
        refuses(case, module, changed(state, number, lambda tensor: tensor[..., None]), ValueError)
        if tensor.dim() > 1:
            refuses(case, module, changed(state, number, lambda tensor: tensor.flatten()), ValueError)


def test_another_type(case, module):
    narrower = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    state = left_by(case, module)
    for number, tensor in tensors_of(state):
        dtype = narrower[tensor.dtype]
        wrong = changed(state, number, lambda tensor: tensor.to(dtype))  # noqa: B023
        refuses(case, module, wrong, ValueError, str(dtype).removeprefix("torch."))


def test_another_device(case, module):
    state, here = left_by(case, module), f"on {torch.get_default_device().type}"
    for number, _ in tensors_of(state):
        refuses(case, module, changed(state, number, lambda tensor: tensor.to("meta")), ValueError, "on meta", here)


def test_no_tensor(case, module):
    state = left_by(case, module)
    for number, _ in tensors_of(state):
        refuses(case, module, changed(state, number, lambda tensor: None), (ValueError, TypeError), "None")


def test_another_modules_state(case, module):
    state = left_by(case, module)
    refuses(case, module, ForeignState(*list(states.tensors(state))[:1]), TypeError, "a ForeignState")
    refuses(case, module, tuple(state), TypeError, "a tuple")
    refuses(case, module, list(state), TypeError, "a list")
    refuses(case, module, next(states.tensors(state)), TypeError)
    refuses(case, module, "abc", TypeError, "a str")


def test_other_layers(case, module):
    state = left_by(case, module)
    if not hasattr(state, "layers"):
        return
    n_layer = len(state.layers)
    refuses(case, module, state._replace(layers=state.layers[:-1]), ValueError, f"{n_layer - 1} states")
    refuses(case, module, state._replace(layers=(*state.layers, state.layers[0])), ValueError, f"{n_layer + 1} states")
    refuses(case, module, state._replace(layers=(None, *state.layers[1:])), ValueError, "None")
    foreign = ForeignState(next(states.tensors(state.layers[0])))
    refuses(case, module, state._replace(layers=(foreign, *state.layers[1:])), TypeError, "a ForeignState")


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


def test_require_state_takes_its_own_and_no_others(case, module):
    owner, state = getattr(module, "model", module), left_by(case, module)
    owner.require_state(state, 2)
    owner.require_state(owner.initial_state(3), 3)
    for wrong in (left_by(case, module, 3), changed(state, 0, lambda tensor: tensor[..., None])):
        with pytest.raises(ValueError, match=r"state.*; expected "):
            owner.require_state(wrong, 2)
    with pytest.raises(TypeError, match="a tuple; expected "):
        owner.require_state(tuple(state), 2)


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


def test_a_state_of_another_batch_never_reaches_the_kernels():
    """It once gave garbage, and corrupted the heap in the backward pass."""
    layer = recurra.create_mixer("gateloop", 64)
    _, state = layer(torch.randn(1, 8, 64))
    message = r"^state.h is complex64 \(1, 64, 1, 1\) on cpu; expected complex64 \(64, 64, 1, 1\)"
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(64, 32, 64), state)
