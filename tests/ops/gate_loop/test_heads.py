"""Numba's kernels for heads: sizes beside the vectors' and the blocks', chunk borders, and the operator around them."""

from contextlib import nullcontext

import pytest
import torch
from tests.ops.gate_loop.conftest import Case
from tests.ops.gate_loop.test_modes import assert_near, differentiate

from recurra.ops.gate_loop import _heads as heads
from recurra.ops.gate_loop.reference import recurrent

# one vector has 16 floats, a block 1, 2 or 4 vectors; a complex number is two floats
CASES = {
    "below a vector": Case(3, 5, 6, 1),
    "one channel": Case(2, 1, 4, 1),
    "one column": Case(2, 4, 1, 4),
    "blocks of columns": Case(1, 16, 120, 1),
    "blocks of key channels": Case(1, 27, 9, 1),
    "blocks of both, vector gates": Case(1, 120, 113, 120),
    "complex, blocks of both": Case(1, 60, 33, 1, "qkvas"),
}


def test_blocks():
    """The last ones are half full at most where that takes less time than smaller ones would."""
    found = {floats: heads._vectors(floats) for floats in (1, 16, 17, 32, 38, 49, 64, 76, 120, 128)}
    assert found == {1: 1, 16: 1, 17: 2, 32: 2, 38: 1, 49: 4, 64: 4, 76: 1, 120: 4, 128: 4}


def by_kernels(inputs):
    return heads.chunk_by_heads(*inputs[:4], inputs.state)


def step_by_step(inputs):
    return recurrent(*inputs[:4], inputs.state, "reference")


USUAL = "below a vector", "blocks of both, vector gates", "complex, blocks of both"


@pytest.fixture(params=[name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def sized(request):
    return CASES[request.param]


@pytest.mark.parametrize("length", [1, 67])  # the backward pass computes 32 steps again at a time
def test_every_size_in_float64(sized, length):
    inputs = sized.draw(length)
    assert_near(differentiate(by_kernels, inputs), differentiate(step_by_step, inputs), 1e-13, "the kernels")


def test_in_float32():
    inputs = CASES["below a vector"].draw(40)
    expected = differentiate(step_by_step, inputs)
    assert_near(differentiate(by_kernels, inputs.to(torch.float32)), expected, 2e-6, "the kernels")


@pytest.mark.parametrize("length", [pytest.param(32, marks=pytest.mark.slow), 67])
def test_gates_without_a_gradient(sized, length):
    """Other kernels, for the gradients of q, k, v and the state."""
    inputs = sized.draw(length)
    rest = lambda function: lambda x: function(x._replace(a=inputs.a))  # noqa: E731
    found, expected = (differentiate_all_but_gates(rest(f), inputs) for f in (by_kernels, step_by_step))
    assert_near(found, expected, 1e-13, "the kernels")


def differentiate_all_but_gates(function, inputs):
    q, k, v, _, state = (x.detach().requires_grad_() for x in inputs)
    y, last = function(inputs._replace(q=q, k=k, v=v, state=state))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in (y, last)]
    value = sum((w * x).sum() for w, x in zip(weights, (y, last)))
    return y, last, *torch.autograd.grad(value.real, (q, k, v, state))


def test_large_states_are_kept_less_often():
    """The test of every size runs both."""
    drawn = [CASES[name].draw(1) for name in USUAL]
    assert [heads._every(inputs.q, inputs.v) for inputs in drawn] == [32, 64, 32]


def test_a_cut_changes_no_bit(sized):
    inputs = sized.draw(20)
    y, last = by_kernels(inputs)
    first, state = by_kernels(inputs._replace(**{n: x[:, :7] for n, x in zip("qkva", inputs)}))
    second, end = by_kernels(inputs._replace(state=state, **{n: x[:, 7:] for n, x in zip("qkva", inputs)}))
    assert torch.equal(torch.cat([first, second], 1), y)
    assert torch.equal(end, last)


def test_nothing_is_read_or_written_beside_the_inputs():
    """Memory around and between the heads is NaN, and stays as it is."""
    case = Case(2, 5, 18, 5)
    inputs, surrounded = case.draw(8), []
    for x in inputs[:4]:
        memory = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype)
        memory[..., 1:-2] = x
        surrounded.append(memory[..., 1:-2])
    y, last = by_kernels(inputs._replace(**dict(zip("qkva", surrounded))))
    expected = by_kernels(inputs)
    assert torch.equal(y, expected[0])
    assert torch.equal(last, expected[1])


@pytest.mark.parametrize(("number", "largest"), [(torch.float32, 128), (torch.complex64, 64)])
def test_chunks_on_a_card_have_a_largest_head(number, largest):
    a = torch.ones(1, 2, 1, 1, dtype=number)
    for d_qk, d_v in ((largest, 3), (3, largest), (largest + 1, 3), (3, largest + 1)):
        q, v = torch.ones(1, 2, 1, d_qk), torch.ones(1, 2, 1, d_v)
        state = torch.zeros(1, 1, d_qk, d_v, dtype=number)
        is_taken = max(d_qk, d_v) == largest
        assert bool(heads.why_not_kernels(d_qk, d_v, number)) is not is_taken
        expected = f"{'d_qk' if d_qk > d_v else 'd_v'} is {largest + 1}; expected at most {largest}"
        with nullcontext() if is_taken else pytest.raises(ValueError, match=expected):
            heads._check_chunk(q, q, v, a, state)
