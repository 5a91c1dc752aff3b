"""However a stream is cut, feeding the pieces in order with the carried state gives what the whole gives."""

import pytest
import torch
from tests.contracts.conftest import of_each_kind
from torch import nn

from recurra import state as states
from recurra.train.losses import checkpointed

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def run_in_pieces(module, x, pieces, state=None):
    outputs = []
    for piece in x.split(pieces, 1):
        y, state = module(piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def entering_state(case, module):
    """A state from earlier in a stream, with tensors that record gradients."""
    with torch.no_grad():
        _, state = module(case.draw(2, 5))
    return states.map_tensors(lambda tensor: tensor.clone().requires_grad_(), state)


def results(module, x, pieces, state):
    """Outputs, last state and all gradients (parameters, input, entering state) of a loss over both.

    What no later step sees of an entering state has a gradient of zeros.
    """
    module.zero_grad()
    leaves = list(states.tensors(state))
    if x.is_floating_point():
        x = x.clone().requires_grad_()
        leaves.append(x)
    y, last = run_in_pieces(module, x, pieces, state)
    flat = [y, *states.tensors(last)]
    weights = torch.Generator(torch.get_default_device()).manual_seed(3)
    loss = sum((torch.randn(t.shape, generator=weights, dtype=t.dtype) * t).sum().real.abs() for t in flat)
    leaves += list(module.parameters())
    return [t.detach() for t in flat], torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


def assert_all_close(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected):
        torch.testing.assert_close(one, other, **CLOSE)


def test_any_cut_gives_the_whole(case, module):
    """Short pieces first, from the start of a stream; and long ones first, from its middle."""
    for pieces, state in ((case.pieces, None), (case.pieces[::-2], entering_state(case, module))):
        x = case.draw(2, sum(pieces))
        whole = results(module, x, [sum(pieces)], state)
        cut = results(module, x, pieces, state)
        assert_all_close(cut[0], whole[0])
        assert_all_close(cut[1], whole[1])


@of_each_kind
def test_one_step_at_a_time_gives_the_whole(case, module):
    length = min(23, 2 * max(case.pieces) + 1)
    x = case.draw(2, length)
    whole = results(module, x, [length], None)
    steps = results(module, x, [1] * length, None)
    assert_all_close(steps[0], whole[0])
    assert_all_close(steps[1], whole[1])


class _Checkpointed(nn.Module):
    """A module whose pieces of 4 steps are computed again in the backward pass."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, state=None):
        return checkpointed(self.module, x, state, piece=4)


@of_each_kind
def test_pieces_that_are_computed_again_give_the_whole(case, module):
    x, state = case.draw(2, 9), entering_state(case, module)
    whole = results(module, x, [9], state)
    again = results(_Checkpointed(module), x, [9], state)
    assert_all_close(again[0], whole[0])
    assert_all_close(again[1], whole[1])


def test_a_piece_of_no_steps_changes_nothing(case, module):
    x = case.draw(2, 9)
    if not case.takes_no_steps:
        with pytest.raises(ValueError, match="0 frames"):
            module(x[:, :0])
        return
    y, last = module(x)
    with_gap, same = run_in_pieces(module, x, [4, 0, 5])
    torch.testing.assert_close(with_gap, y, **CLOSE)
    assert_all_close(list(states.tensors(same)), list(states.tensors(last)))


def test_the_past_does_not_see_the_future(case, module):
    x = case.draw(2, 12)
    other = torch.cat([x[:, :7], case.draw(2, 5)], 1)
    torch.testing.assert_close(module(x)[0][:, :7], module(other)[0][:, :7], **CLOSE)
    assert not torch.allclose(module(x)[0][:, 7:], module(other)[0][:, 7:])


def test_the_state_matters(case, module):
    """Guards the suite itself: a module that dropped its state would pass a comparison of fresh starts."""
    x = case.draw(2, 6)
    fresh, _ = module(x)
    resumed, _ = module(x, entering_state(case, module))
    assert not torch.allclose(fresh, resumed)
