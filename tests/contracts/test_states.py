"""States are plain values: passed in and returned, of constant size, float32 or better, never changed in place."""

import torch
from tests.contracts.conftest import of_each_kind

from recurra import state as states


def snapshot(state):
    return [tensor.detach().clone() for tensor in states.tensors(state)]


def draw_leaf(case, length):
    """An input that records gradients: the state of a token shift is the input itself."""
    x = case.draw(2, length)
    return x.requires_grad_() if x.is_floating_point() else x


@of_each_kind
def test_detach_cuts_the_gradient(case, module):
    x = draw_leaf(case, 6)
    _, state = module(x)
    assert any(tensor.requires_grad for tensor in states.tensors(state))
    assert not any(tensor.requires_grad for tensor in states.tensors(states.detach(state)))


def test_gradients_flow_through_the_state(case, module):
    """The last output's loss reaches the first piece, x and parameters, only through the state that was carried."""
    first, second = draw_leaf(case, 6), case.draw(2, 3)
    leaves = [*module.parameters(), *([first] if first.requires_grad else [])]
    _, state = module(first)
    y, _ = module(second, state)
    options = {"allow_unused": True, "materialize_grads": True}  # a first memory is reached through the state alone
    through = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True, **options)
    y, _ = module(second, states.detach(state))
    cut = torch.autograd.grad(y.square().sum(), leaves, **options)
    assert any(not torch.allclose(one, other) for one, other in zip(through, cut))


@of_each_kind
def test_select_takes_streams_out_of_a_batch(case, module):
    x, later = case.draw(4, 6), case.draw(4, 5)
    _, state = module(x)
    whole, _ = module(later, state)
    index = torch.tensor([2, 0])
    part, _ = module(later[index], states.select(state, index))
    torch.testing.assert_close(part, whole[index])


def test_a_given_state_is_not_changed(case, module):
    x = case.draw(2, 6)
    _, state = module(x)
    before = snapshot(state)
    y, later = module(case.draw(2, 6), state)
    (y.square().sum() + sum(t.abs().sum() for t in states.tensors(later))).backward()
    assert all(torch.equal(one, other) for one, other in zip(before, states.tensors(state)))


def test_nothing_is_kept_on_the_module(case, module):
    x = case.draw(2, 6)
    first, _ = module(x)
    module(case.draw(3, 9))
    again, _ = module(x)
    assert torch.equal(first, again)


@torch.no_grad()
def test_size_is_bounded_however_long_the_stream(case, module):
    """Constant for a recurrence; with segments it grows and shrinks inside of one, so lengths of one phase agree."""
    lengths = (22, 82) if case.takes_no_steps else (6, 12)  # clips: the steps are whole segments
    sizes = {states.n_bytes(module(case.draw(2, length))[1]) for length in lengths}
    assert len(sizes) == 1
    assert max(states.n_bytes(module(case.draw(2, length))[1]) for length in range(1, 13)) <= 2 * sizes.pop()


def test_states_stay_float32_under_autocast(case):
    torch.manual_seed(0)
    module = case.build()
    x = case.draw(2, 6)
    x = x.float() if x.is_floating_point() else x
    with torch.autocast("cpu", torch.bfloat16):
        y, state = module(x)
        y, state = module(x, state)
    assert y.dtype in (torch.bfloat16, torch.float32)  # log-probabilities are float32
    assert {tensor.dtype for tensor in states.tensors(state)} <= {torch.float32, torch.complex64}
    exact, _ = module(x, module(x)[1])
    # where a rounding changes the choice of a hash, much follows from it
    assert (y.float() - exact).norm() <= 0.5 * exact.norm()


def test_states_stay_float32_where_weights_are_bfloat16(case):
    module, x = case.build().bfloat16().eval(), case.draw(2, 6)
    x = x.bfloat16() if x.is_floating_point() else x
    with torch.no_grad():
        y, state = module(x)
        y, state = module(x, state)
        assert y.dtype in (torch.bfloat16, torch.float32)
        assert {tensor.dtype for tensor in states.tensors(state)} <= {torch.float32, torch.complex64}
        exact = module.float()(x.float() if x.is_floating_point() else x)
        exact, _ = module(x.float() if x.is_floating_point() else x, exact[1])
    torch.testing.assert_close(y.float(), exact, rtol=0.2, atol=0.2)


@of_each_kind
def test_bytes_are_counted(case, module):
    _, state = module(case.draw(2, 6))
    assert states.n_bytes(state) == sum(t.numel() * t.element_size() for t in states.tensors(state)) > 0
