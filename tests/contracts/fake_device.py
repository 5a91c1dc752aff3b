"""Every module of the contract suite on a device other than the CPU, without one: by fake tensors.

They have no numbers, and refuse to mix devices. tests/contracts/test_devices.py runs this in a process of its own, as a
device is registered for all of it.
"""

import sys
import traceback
from typing import Any

import torch
from tests.contracts.conftest import Case, _compiled_cases
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from recurra import state as states

NAME = "elsewhere"
BEYOND = {
    "language-model-gru",
    "language-model-hyena",
    "hyena-third-order",
}  # call what only a real device has: cuDNN, numbers from a list
WITHOUT_A_LOSS = {"transformer-xl-adaptive"}  # its loss takes as many rows as there are rare words


class Module(backend_registration._DummyBackendModule):
    """What torch.autocast asks a device for."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def is_autocast_enabled(self) -> bool:
        return False


def elsewhere(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=NAME)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=NAME)


def move(module: nn.Module) -> None:
    for part in module.modules():
        for name, parameter in part._parameters.items():
            part._parameters[name] = parameter if parameter is None else nn.Parameter(elsewhere(parameter))
        for name, buffer in part._buffers.items():
            part._buffers[name] = buffer if buffer is None else elsewhere(buffer)


def check(case: Case) -> None:
    module: Any = case.build()
    x = case.draw(2, 9 if case.takes_no_steps else 2)
    x = x.float() if x.is_floating_point() else x
    with FakeTensorMode():
        move(module)
        moved = elsewhere(x)
        y, state = module(moved)
        y, state = module(moved[:, :1], state)
        kept = states.select(state, torch.ones((1,), dtype=torch.long, device=NAME))
        found = [y, *states.tensors(state), *states.tensors(states.detach(kept))]
        if hasattr(module, "loss") and not x.is_floating_point() and case.name not in WITHOUT_A_LOSS:
            found.append(module.loss(moved, moved, state)[0])
        assert {tensor.device.type for tensor in found} == {NAME}


def main() -> int:
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    n_failed = 0
    cases = [case for case in _compiled_cases() if case.name not in BEYOND]
    for case in cases:
        try:
            check(case)
        except Exception:
            n_failed += 1
            print(f"{case.name}: {traceback.format_exc()}", file=sys.stderr)
    print(f"{len(cases) - n_failed} of {len(cases)} modules")
    return int(n_failed > 0 or not cases)


if __name__ == "__main__":
    raise SystemExit(main())
