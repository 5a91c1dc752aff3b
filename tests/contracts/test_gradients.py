"""A parameter that plays no part in a call has a gradient of zeros, never None: DDP would wait for it forever."""

import torch


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
