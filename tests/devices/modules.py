"""Every module of the contract suite on another device: its outputs, states and gradients are those of the CPU."""

import copy
import traceback
from typing import Any

import torch
from tests.contracts.conftest import KINDS, Case, all_cases
from tests.devices.elsewhere import DEVICE, NAME
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from recurra import list_mixers
from recurra import state as states

BEYOND = {"gru", "hyena"}  # call what only a device in C++ has: a fused step, numbers from a list


def compute(module: Any, x: Tensor) -> dict[str, Tensor]:
    """Outputs, states and gradients of two calls, and the loss of a model of tokens."""
    y, state = module(x)
    y, state = module(x[:, :1], state)
    kept = states.select(state, torch.ones((1,), dtype=torch.long, device=x.device))
    found = {"y": y, "kept": [*states.tensors(states.detach(kept))], "state": [*states.tensors(state)]}
    total = y.square().sum() + sum(t.abs().square().sum() for t in found["state"])
    if hasattr(module, "loss") and not x.is_floating_point():
        found["loss"], _ = module.loss(x, x, state)
        total = total + found["loss"].sum()
    total.backward()
    return found | {name: parameter.grad for name, parameter in module.named_parameters()}


def check(case: Case) -> None:
    torch.manual_seed(0)
    module: nn.Module = case.build().double()
    x = case.draw(2, 5 if case.takes_no_steps else 2)
    moved = copy.deepcopy(module)
    expected = compute(module, x)
    found = compute(moved.to(DEVICE), x.to(DEVICE))
    tensors = [tensor for tensor in tree_leaves(found) if tensor is not None]
    assert {tensor.device.type for tensor in tensors} == {NAME}
    found = tree_map_only(Tensor, Tensor.cpu, found)
    for name, value in expected.items():
        try:
            torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-9)
        except AssertionError as error:
            raise AssertionError(name) from error


def check_modules(every: bool) -> None:
    """Check every case, or each mixer and kind of state.

    Each one's name is printed first: an error inside of autograd kills the process.
    """
    failed = []
    few = KINDS | {*list_mixers()}
    cases = [case for case in all_cases() if (every or case.name in few) and not BEYOND & set(case.name.split("-"))]
    for case in cases:
        print(case.name, flush=True)
        try:
            check(case)
        except Exception:
            failed.append(case.name)
            traceback.print_exc()
    assert cases
    assert not failed
