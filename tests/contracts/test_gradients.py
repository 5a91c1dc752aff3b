"""A parameter that plays no part in a call has a gradient of zeros, never None: DDP would wait for it forever."""

import pytest
import torch


def without_gradient(module, y):
    y.square().sum().backward()
    return [name for name, parameter in module.named_parameters() if parameter.grad is None]


@pytest.mark.parametrize("n_before", [0, 2])
def test_one_step(case, module, n_before):
    state = None
    if n_before:
        with torch.no_grad():
            _, state = module(case.draw(2, n_before))
    assert without_gradient(module, module(case.draw(2, 1), state)[0]) == []


@pytest.mark.parametrize("length", [0, 3])
def test_no_step_or_padding_alone(case, module, length):
    if not case.takes_no_steps:
        pytest.skip("clips have whole segments")
    x, options = case.draw(2, length), {"mask": torch.zeros(2, length, dtype=torch.bool)} if length else {}
    x = x.requires_grad_() if x.is_floating_point() else x
    assert without_gradient(module, module(x, **options)[0]) == []
