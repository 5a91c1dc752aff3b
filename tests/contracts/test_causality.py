"""A step changes nothing before it, and its gradient nothing after it: not by outliers, infinities or NaN."""

from collections.abc import Callable

import pytest
import torch
from tests.contracts.conftest import D_MODEL, Case, _channels, _clips, _mixer_cases, _model_cases

LENGTH = 80  # beyond every window, chunk and direct convolution of the suite
STEP = 58  # within a window of 5 steps and a segment of 4; so is LENGTH - STEP
VALUES = [1e3, 1e6, torch.inf, torch.nan]
MODELS = {"crt-ncgru", "crvit", "rmt", "block-recurrent-transformer", "transformer-xl-pre-norm", "hybrid"}
CASES = [case for case in _mixer_cases() if case.draw is _channels] + [
    case for case in _model_cases() if case.name in MODELS
]
ROUNDING = 8 * torch.finfo(torch.float32).eps  # of the largest number: products of other sizes may round otherwise


def require_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING * float(expected.abs().max()))


def by_vectors(case: Case) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, int]:
    """The outputs as a function of vectors over time, or of clips; such inputs; and a step in a segment."""
    module = case.build()
    if case.draw is _channels:
        return lambda x: module(x)[0], torch.randn(2, LENGTH, D_MODEL), STEP
    if case.draw is _clips:
        return lambda x: module(x)[0], _clips(2, 4).float(), 2
    return lambda x: module.hidden(x)[0], torch.randn(2, 11, D_MODEL), 6


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("recording", [False, True], ids=["without gradients", "with gradients"])
def test_a_later_input_changes_no_output(case: Case, recording: bool):
    function, x, step = by_vectors(case)
    with torch.set_grad_enabled(recording):
        expected = function(x.requires_grad_(recording)).detach()
        for value in VALUES:
            changed = x.detach().clone()
            changed[0, step] = value
            y = function(changed.requires_grad_(recording)).detach()
            require_same(y[:, :step], expected[:, :step])
            require_same(y[1], expected[1])  # nor another sequence


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_earlier_outputs_gradient_changes_no_later_one(case: Case):
    function, x, step = by_vectors(case)
    y = function(x.requires_grad_())
    given, step = torch.randn_like(y), y.shape[1] - step
    (expected,) = torch.autograd.grad(y, x, given, retain_graph=True)
    for value in VALUES:
        changed = given.clone()
        changed[0, step] = value
        (found,) = torch.autograd.grad(y, x, changed, retain_graph=True)
        require_same(found[:, step + 1 :], expected[:, step + 1 :])
        require_same(found[1], expected[1])  # nor another sequence
        if value < torch.inf:
            assert found.isfinite().all()
        else:
            assert not found[0, : step + 1].isfinite().all()  # nothing is left out in silence


@pytest.mark.parametrize("name", ["rotary-attention", "gateloop-attention", "delta-net"])
def test_under_transforms_outliers_stay_apart(name: str):
    """Finite ones: nobody looks for an infinity there."""
    function, x, step = by_vectors(next(case for case in CASES if case.name == name))
    one = lambda x: function(x[None])[0]  # noqa: E731
    changed, given = x.clone(), torch.randn_like(x)
    changed[:, step] = 1e6
    require_same(torch.func.vmap(one)(changed)[:, :step].detach(), function(x)[:, :step].detach())
    expected, found = (
        torch.func.vjp(function, x)[1](dy)[0].detach() for dy in (given, given.index_fill(1, torch.tensor([step]), 1e6))
    )
    require_same(found[:, step + 1 :], expected[:, step + 1 :])
