"""Kernels that walk step by step, of GateLoop with heads, the delta rules and the selective scan.

They have the numbers of the references, for any layout and number of threads, and write nothing beyond.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from tests.gradients import differentiate, require_near
from tests.ops.delta_rule.conftest import assert_near, draw_generalised, draw_inputs
from tests.ops.gate_loop.conftest import Case
from tests.ops.selective_scan.test_selective_scan import by_kernels
from tests.ops.selective_scan.test_selective_scan import draw as draw_selective
from torch.func import jvp, vmap

from recurra import delta_rule
from recurra.ops.delta_rule import generalised_delta_rule
from recurra.ops.delta_rule.reference import generalised_recurrent
from recurra.ops.gate_loop import reference as modes
from recurra.ops.gate_loop._heads import chunk_by_heads
from recurra.ops.selective_scan.reference import at_once


class Rule(NamedTuple):
    """A rule by its kernels, step by step, and by what takes more steps without kernels."""

    draw: Callable
    kernels: Callable
    by_steps: Callable
    plain: Callable


def draw_heads(length, heads=2, d_qk=3, d_v=5, batch=2):
    return Case(heads, d_qk, d_v, 1).draw(length, batch)


def draw_scan(length, heads=2, d_qk=3, d_v=5, batch=2):
    return [x.detach() for x in draw_selective(batch, length, heads * d_v, d_qk)]


MODES = [partial(delta_rule, mode=mode) for mode in ("fused", "recurrent", "chunk")]
BACKENDS = [partial(generalised_delta_rule, backend=backend) for backend in ("numba", "reference")]
RULES = {
    "a decay per head": Rule(draw_inputs, *MODES),
    "per channel": Rule(partial(draw_inputs, per_channel=True), *MODES),
    "generalised": Rule(draw_generalised, BACKENDS[0], generalised_recurrent, BACKENDS[1]),
    "heads": Rule(draw_heads, chunk_by_heads, *(lambda *x, f=f: f(*x, "auto") for f in (modes.recurrent, modes.chunk))),
    "selective scan": Rule(draw_scan, by_kernels, at_once, at_once),
}
TESTED_APART = ("heads", "selective scan")
"""Their sizes and streams are tested beside the operators, whose kernels are chosen by size."""
# vectors of 16, blocks of 64; backwards, blocks of 32 columns, or of 16 from 129 key channels on
SIZES = [(1, 1), (3, 15), (1, 16), (5, 17), (64, 64), (2, 65), (7, 100), (16, 200), (100, 7), (130, 40)]


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


@pytest.fixture(params=[name for name in RULES if name not in TESTED_APART])
def delta(request):
    return RULES[request.param]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("d_qk", "d_v"), SIZES)
@pytest.mark.parametrize("length", [1, 2, 33, 65])
def test_it_is_the_reference(delta, length, d_qk, d_v):
    """The forward pass keeps every 32nd state."""
    inputs = delta.draw(length, 3, d_qk, d_v)
    single = [x.float() for x in inputs]
    kept = [x.clone() for x in single]
    actual = differentiate(delta.kernels, single)
    assert_near(actual, differentiate(delta.by_steps, inputs), inputs)
    assert all(map(torch.equal, single, kept))
    assert actual[1].data_ptr() != single[-1].data_ptr()
    assert all(map(torch.equal, delta.kernels(*single), actual))


@pytest.mark.parametrize("chosen", [[0], [1]], ids=["y", "last state"])
def test_gradients_of_one_result_alone(rule, chosen):
    inputs = rule.draw(35, 2, 5, 20)
    actual = differentiate(rule.kernels, [x.float() for x in inputs], chosen)
    assert_near(actual, differentiate(rule.by_steps, inputs, chosen), inputs)


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_threads_share_the_work(rule, trains, set_threads):
    """Enough work for the parallel kernels; more jobs than threads, and not a multiple of them."""
    inputs, function = [x.float() for x in rule.draw(40, 3, 16, 66, batch=1)], rule.kernels
    results = []
    for n in (1, 2, 5):
        set_threads(n)
        results.append(differentiate(function, inputs) if trains else function(*inputs))
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


def test_second_derivatives(rule):
    inputs, found = rule.draw(6, 1, 3, 4), []
    for function, given in ((rule.kernels, [x.float() for x in inputs]), (rule.by_steps, inputs)):
        leaves = [x.detach().requires_grad_() for x in given]
        y, last = function(*leaves)
        first = torch.autograd.grad(y.square().sum() + last.square().sum(), leaves, create_graph=True)
        found.append([y, last, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)])
    require_near(*found, 1e-4, mixed=True)


@pytest.mark.parametrize("name", [name for name in RULES if name != "selective scan"])  # whose weights have no batch
def test_transforms_of_functions(name):
    """They take the way without kernels."""
    rule = RULES[name]
    inputs = [x.float() for x in rule.draw(40)]
    one_by_one = lambda *x: tuple(y[0] for y in rule.kernels(*(z[None] for z in x)))  # noqa: E731
    torch.testing.assert_close(vmap(one_by_one)(*inputs), rule.plain(*inputs))
    directions = tuple(torch.randn_like(x) for x in inputs)
    found, expected = (jvp(function, tuple(inputs), directions) for function in (rule.kernels, rule.plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_tensors_in_any_layout(rule):
    inputs = [x.float() for x in rule.draw(6, 2, 5, 20)]
    expected = differentiate(rule.kernels, inputs)
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    apart = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    for other in (turned, apart):
        assert not other[0].is_contiguous()
        assert all(map(torch.equal, differentiate(rule.kernels, other), expected))
    one = inputs[4][:1, :1].expand_as(inputs[4])  # the rate, or what is read
    found, expected = (differentiate(rule.kernels, [*inputs[:4], x, *inputs[5:]]) for x in (one, one.contiguous()))
    assert all(map(torch.equal, found, expected))


def test_a_stream_has_the_same_bits_wherever_it_is_cut(delta):
    *over_time, state = (x.float() for x in delta.draw(40, 2, 9, 70))
    y, last = delta.kernels(*over_time, state)
    outputs = []
    for piece in zip(*(x.split([1, 20, 3, 16], 1) for x in over_time)):
        found, state = delta.kernels(*piece, state)
        outputs.append(found)
    assert torch.equal(torch.cat(outputs, 1), y)
    assert torch.equal(state, last)


OF_DELTA_RULE = pytest.mark.parametrize("draw", [RULES[name].draw for name in ("a decay per head", "per channel")])


@pytest.mark.parametrize("length", [1, 3, 70])
@OF_DELTA_RULE
def test_decays_and_rates_of_exactly_zero(draw, length):
    """A decay of 0 forgets everything and a rate of 0 learns nothing, but their own gradients are not 0."""
    inputs = draw(length)
    a, b = (x.masked_fill(torch.rand(x.shape) < 0.3, 0) for x in (inputs.a, inputs.b))
    a[:, -1], b[:, -1] = 0, 0  # nothing comes after the newest
    inputs = inputs._replace(a=a, b=b)
    expected = differentiate(MODES[1], inputs)
    assert expected[5][a == 0].any()
    assert expected[6][b == 0].any()
    assert_near(differentiate(MODES[0], inputs.to(torch.float32)), expected, inputs)


@OF_DELTA_RULE
def test_what_it_does_not_take_is_refused_and_auto_goes_around_it(draw):
    inputs = draw(3).to(torch.float32)
    double = inputs._replace(state=inputs.state.double())
    obstacle = "mode is 'fused'; expected 'auto' or another mode: the kernels compute in float32, not in float64"
    with pytest.raises(ValueError, match=obstacle):
        delta_rule(*double, mode="fused")
    assert delta_rule(*double)[0].shape == inputs.v.shape
    with pytest.raises(ValueError, match="the kernels run on the CPU and on CUDA, and the tensors are on meta"):
        delta_rule(*(x.to("meta") for x in inputs), mode="fused")
