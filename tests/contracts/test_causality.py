"""A step changes nothing before it, and its gradient nothing after it: not by outliers, infinities or NaN."""

import pytest
import torch
from tests.contracts.conftest import Case, _channels, _mixer_cases

LENGTH = 80  # beyond every window, chunk and direct convolution of the suite
STEP = 58  # within a window of 5 steps and a segment of 4; so is the same number from the end
VALUES = [1e3, 1e6, torch.inf, torch.nan]
MIXERS = [case for case in _mixer_cases() if case.draw is _channels]
ROUNDING = 8 * torch.finfo(torch.float32).eps  # of the largest number: products of other sizes may round otherwise


def require_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING * float(expected.abs().max()))


@pytest.mark.parametrize("case", MIXERS, ids=lambda case: case.name)
@pytest.mark.parametrize("recording", [False, True], ids=["without gradients", "with gradients"])
def test_a_later_input_changes_no_output(case: Case, recording: bool):
    module, x = case.build(), torch.randn(2, LENGTH, 12)
    x.requires_grad_(recording)
    with torch.set_grad_enabled(recording):
        expected = module(x)[0].detach()[:, :STEP]
        for value in VALUES:
            changed = x.detach().clone()
            changed[0, STEP] = value
            changed.requires_grad_(recording)
            y = module(changed)[0].detach()
            require_same(y[:, :STEP], expected)
            require_same(y[1, STEP:], module(x)[0].detach()[1, STEP:])  # nor another sequence


@pytest.mark.parametrize("case", MIXERS, ids=lambda case: case.name)
def test_an_earlier_outputs_gradient_changes_no_later_one(case: Case):
    module, x = case.build(), torch.randn(2, LENGTH, 12).requires_grad_()
    y = module(x)[0]
    given = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, given, retain_graph=True)
    for value in VALUES:
        changed = given.clone()
        changed[0, LENGTH - STEP] = value
        (found,) = torch.autograd.grad(y, x, changed, retain_graph=True)
        later = LENGTH - STEP + 1
        require_same(found[:, later:], expected[:, later:])
        require_same(found[1], expected[1])  # nor another sequence
        assert value < torch.inf or not found[0, :later].isfinite().all()  # what is left out says so
