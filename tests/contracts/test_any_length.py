"""torch.compile and torch.export take calls of any length, with few graphs, and compute what eager mode does."""

import pytest
import torch
from tests.contracts.conftest import Case, all_cases
from torch.export import Dim

from recurra import state as states

pytestmark = pytest.mark.compile  # sizes are symbols there, which the shape checks refuse

LENGTHS = (5, 8, 3, 1, 9, 7, 1, 2, 70, 6)
MOST_GRAPHS = 3
"""One for the first length alone, before torch knows that lengths vary; one for any length; one for a single step."""
UNROLLED = ("crt", "rmt", "block-recurrent", "crvit")
"""Models that take another way at the end of a segment: a graph for each number of segments."""
QUICK = {"delta-net", "relative-attention"}
"""A recurrence, and a state that grows; the others are compiled with `-m slow`."""
OF_SEGMENTS = ("relative-attention", "language-model-relative-attention", "transformer-xl", "hybrid")
"""Their states have a size for each place in a segment. torch takes 0 and 1 for constants: here no call ends there."""
INSIDE_OF_SEGMENTS = (6, 8, 5, 3, 9, 7, 4, 12, 72, 5)


FOUR_GRAPHS = pytest.mark.xfail(strict=True, reason="RetNet takes a fourth graph")


def marked(case: Case, *more: pytest.MarkDecorator):
    return pytest.param(case, id=case.name, marks=[*more, *([] if case.name in QUICK else [pytest.mark.slow])])


CASES = [case for case in all_cases() if not case.name.startswith(UNROLLED)]
MIXERS = [case for case in CASES if case.draw(1, 1).dim() == 3]


def gradients(module, x, y, state):
    loss = y.square().sum() + sum(t.abs().square().sum() for t in states.tensors(state))
    inputs = [*module.parameters(), *([x] if x.requires_grad else [])]
    return torch.autograd.grad(loss, inputs, materialize_grads=True)


def require_close(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("case", [marked(case, *([FOUR_GRAPHS] if "retnet" in case.name else [])) for case in CASES])
def test_calls_of_ten_lengths_share_their_graphs(case):
    from functorch.compile import default_partition, make_boxed_func  # seconds, for the tests that compile alone
    from torch._dynamo.backends.common import aot_autograd

    module, graphs = case.build().double(), []
    keep = lambda graph, inputs: make_boxed_func(graph.forward)  # noqa: E731

    def count(graph, inputs):
        graphs.append(graph)
        return keep(graph, inputs)

    both_ways = aot_autograd(fw_compiler=count, bw_compiler=keep, partition_fn=default_partition)
    compiled = torch.compile(module, fullgraph=True, backend=both_ways)
    state = expected_state = module.initial_state(2)
    grows = case.name.startswith(OF_SEGMENTS)
    for length in INSIDE_OF_SEGMENTS if grows else LENGTHS:
        x = case.draw(2, length)
        x = x.requires_grad_() if x.is_floating_point() else x
        y, state = compiled(x, state)
        expected, expected_state = module(x, expected_state)
        require_close([y, *states.tensors(state)], [expected, *states.tensors(expected_state)])
        require_close(gradients(module, x, y, state), gradients(module, x, expected, expected_state))
        state, expected_state = states.detach(state), states.detach(expected_state)
    assert len(graphs) <= MOST_GRAPHS + 2 * grows  # sizes of the state vary only later


class _Flat(torch.nn.Module):
    """A mixer whose state is a list of tensors."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, x, *state):
        y, last = self.mixer(x, type(self.mixer.state_layout)(*state))
        return y, *last


@pytest.mark.parametrize("case", map(marked, MIXERS))
def test_an_exported_mixer_takes_other_lengths(case):
    module = _Flat(case.build().double())
    # no state that enters or leaves has a size of 0 or 1, which torch takes for a constant
    before = (6, 7) if case.name == "relative-attention" else (2, 3)
    with torch.no_grad():
        _, state = module.mixer(case.draw(2, before[0]), None)
        past = tuple({1: Dim.DYNAMIC} if is_past(module, name) else {} for name in state._fields)
        inputs = (case.draw(2, 5), *state)
        program = torch.export.export(module, inputs, dynamic_shapes=({1: Dim.DYNAMIC}, past), strict=False).module()
        for length in (3, 8, 7):
            x, state = case.draw(2, length), module.mixer(case.draw(2, before[1]), None)[1]
            require_close(program(x, *state), module(x, *state))


def is_past(module, name):
    """Whether the first dimension of a state after the batch counts steps."""
    first, *_ = getattr(module.mixer.state_layout, name).shape
    return isinstance(first, tuple)
