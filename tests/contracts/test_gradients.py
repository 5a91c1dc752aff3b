"""A parameter that plays no part in a call has a gradient of zeros, never None: DDP would wait for it forever."""

import torch
from tests.contracts.conftest import D_MODEL


def require_gradients(module, y):
    module.zero_grad()
    y.square().sum().backward()
    assert [name for name, parameter in module.named_parameters() if parameter.grad is None] == []


def test_one_step(case, module):
    with torch.no_grad():
        _, later = module(case.draw(2, 2))
    for state in (None, later):
        require_gradients(module, module(case.draw(2, 1), state)[0])


def test_no_step_or_padding_alone(case, module):
    if not case.takes_no_steps:
        return  # clips have whole segments
    for length, options in ((0, {}), (3, {"mask": torch.zeros(2, 3, dtype=torch.bool)})):
        x = case.draw(2, length)
        x = x.requires_grad_() if x.is_floating_point() else x
        require_gradients(module, module(x, **options)[0])


def test_rows_of_zeros_and_equal_rows_have_bounded_gradients(mixer):
    """Of streams with a block of zeros, and of one row again and again: within what a norm of epsilon 1e-6 allows."""
    largest = []
    for change in (None, "zeros", "equal"):
        x = torch.randn(2, 40, D_MODEL, dtype=torch.float64)
        if change == "zeros":
            x[:, 10:30] = 0
        elif change == "equal":
            x[:] = x[:, :1]
        x.requires_grad_()
        mixer.zero_grad()
        mixer(x)[0].sum().backward()
        largest.append(max(float(part.grad.abs().max()) for part in (x, *mixer.parameters())))
    assert max(largest) <= 1e4 * largest[0]
