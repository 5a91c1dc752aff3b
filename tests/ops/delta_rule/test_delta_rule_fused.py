"""The kernels of the delta rule: the numbers of the reference for every size and layout, and nothing beyond."""

import math

import pytest
import torch
from tests.gradients import differentiate
from torch.func import jvp, vmap

from recurra import delta_rule

# vectors of 16, blocks of 64; backwards, blocks of 32 columns, or of 16 from 129 key channels on
SIZES = [(1, 1), (3, 15), (1, 16), (5, 17), (64, 64), (2, 65), (7, 100), (16, 200), (100, 7), (130, 40)]
NAMES = ("y", "last state", "dq", "dk", "dv", "da", "db", "dstate")


def run(inputs, mode, chosen=None):
    return differentiate(lambda *x: delta_rule(*x, mode=mode), inputs, chosen)


def assert_near(actual, expected, inputs):
    """Sums of n products round n times, in either direction: by about sqrt(n) eps; four of them follow one another."""
    n_terms = inputs.q.shape[1] + inputs.q.shape[-1] + inputs.v.shape[-1]
    tolerance = 4 * math.sqrt(n_terms) * torch.finfo(torch.float32).eps
    for name, mine, right in zip(NAMES, actual, expected):
        assert mine.dtype == torch.float32
        assert (mine.double() - right).abs().max() <= tolerance * right.abs().max(), name


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("d_qk", "d_v"), SIZES)
@pytest.mark.parametrize("length", [1, 2, 33, 65])
def test_it_is_the_reference(draw, length, d_qk, d_v):
    """The forward pass keeps every 32nd state."""
    inputs = draw(length, 3, d_qk, d_v)
    single = inputs.to(torch.float32)
    kept = [x.clone() for x in single]
    actual = run(single, "fused")
    assert_near(actual, run(inputs, "recurrent"), inputs)
    assert all(map(torch.equal, single, kept))
    assert actual[1].data_ptr() != single.state.data_ptr()
    assert all(map(torch.equal, delta_rule(*single, mode="fused"), actual))


@pytest.mark.parametrize("chosen", [[0], [1]], ids=["y", "last state"])
def test_gradients_of_one_result_alone(draw, chosen):
    inputs = draw(35, 2, 5, 20)
    actual = run(inputs.to(torch.float32), "fused", chosen)
    assert_near(actual, run(inputs, "recurrent", chosen), inputs)


@pytest.mark.parametrize("length", [1, 3, 70])
def test_decays_and_rates_of_exactly_zero(draw, length):
    """A decay of 0 forgets everything and a rate of 0 learns nothing, but their own gradients are not 0."""
    inputs = draw(length)
    a, b = (x.masked_fill(torch.rand(x.shape) < 0.3, 0) for x in (inputs.a, inputs.b))
    a[:, -1], b[:, -1] = 0, 0  # nothing comes after the newest
    inputs = inputs._replace(a=a, b=b)
    expected = run(inputs, "recurrent")
    assert expected[5][a == 0].any()
    assert expected[6][b == 0].any()
    assert_near(run(inputs.to(torch.float32), "fused"), expected, inputs)


def test_second_derivatives(draw):
    inputs, found = draw(6, 1, 3, 4), []
    for mode, given in (("fused", inputs.to(torch.float32)), ("recurrent", inputs)):
        leaves = [x.detach().requires_grad_() for x in given]
        y, last = delta_rule(*leaves, mode=mode)
        first = torch.autograd.grad(y.square().sum() + last.square().sum(), leaves, create_graph=True)
        found.append([y, last, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)])
    torch.testing.assert_close([x.double() for x in found[0]], found[1], rtol=1e-4, atol=1e-4)


def test_transforms_of_functions(draw):
    """They take the way without kernels."""
    inputs = draw(40).to(torch.float32)
    function, plain = (lambda *x, mode=mode: delta_rule(*x, mode=mode) for mode in ("fused", "chunk"))
    one_by_one = lambda *x: tuple(y[0] for y in function(*(z[None] for z in x)))  # noqa: E731
    torch.testing.assert_close(vmap(one_by_one)(*inputs), plain(*inputs))
    directions = tuple(torch.randn_like(x) for x in inputs)
    torch.testing.assert_close(
        jvp(function, tuple(inputs), directions), jvp(plain, tuple(inputs), directions), rtol=0, atol=0
    )


def test_tensors_in_any_layout(draw):
    inputs = draw(6, 2, 5, 20).to(torch.float32)
    expected = run(inputs, "fused")
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    apart = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    for other in (turned, apart):
        assert not other[0].is_contiguous()
        assert all(map(torch.equal, run(other, "fused"), expected))
    one = inputs.b[:1, :1].expand_as(inputs.b)
    actual = run(inputs._replace(b=one), "fused")
    assert all(map(torch.equal, actual, run(inputs._replace(b=one.contiguous()), "fused")))


def test_a_stream_has_the_same_bits_wherever_it_is_cut(draw):
    inputs = draw(40, 2, 9, 70).to(torch.float32)
    whole = delta_rule(*inputs, mode="fused")
    outputs, state = [], inputs.state
    for piece in zip(*(x.split([1, 20, 3, 16], 1) for x in inputs[:5])):
        y, state = delta_rule(*piece, state, mode="fused")
        outputs.append(y)
    assert torch.equal(torch.cat(outputs, 1), whole[0])
    assert torch.equal(state, whole[1])


def test_what_it_does_not_take_is_refused_and_auto_goes_around_it(draw):
    inputs = draw(3).to(torch.float32)
    double = inputs._replace(state=inputs.state.double())
    obstacle = "mode is 'fused'; expected 'auto' or another mode: the kernels compute in float32, not in float64"
    with pytest.raises(ValueError, match=obstacle):
        delta_rule(*double, mode="fused")
    assert delta_rule(*double)[0].shape == inputs.v.shape
    with pytest.raises(ValueError, match="the kernels run on the CPU and on CUDA, and the tensors are on meta"):
        delta_rule(*(x.to("meta") for x in inputs), mode="fused")
