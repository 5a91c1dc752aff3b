"""From a model's step to instructions: the step runs once, and each operation that torch is asked for is lowered."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from recurra.decoding.instructions import Instruction
from recurra.decoding.lowering import RULES, SHAPE_ONLY, VIEWED_ANEW
from recurra.decoding.step_memory import StepMemory, StepNotCompiled
from recurra.decoding.workspace import share_workspace


class LoweredStep(NamedTuple):
    """A step as instructions."""

    instructions: list[Instruction]
    kept: list[Tensor]
    """The memory that the instructions name."""
    inputs: list[Tensor]
    outputs: list[Tensor]
    """The tensors whose places each call's own take."""


def lower_step(step: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> LoweredStep:
    """Run `step` with copies of `inputs`, and write what it does down as instructions.

    Raises:
        StepNotCompiled: the step fails, or has an operation for which there is no instruction.
    """
    inputs = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in inputs]
    memory = StepMemory(inputs)
    try:
        with _Lowering(memory):
            outputs = [memory.meet(tensor) for tensor in step(*inputs)]
        outputs = _own_storages(memory, outputs)
    except StepNotCompiled:
        raise
    except Exception as error:  # whatever a rule does not foresee
        raise StepNotCompiled(f"the step cannot be compiled: {error}") from error
    moving = {tensor.untyped_storage().data_ptr() for tensor in (*inputs, *outputs)}
    kept = memory.workspace()
    lasting = moving | {tensor.untyped_storage().data_ptr() for tensor in kept if memory.is_constant(tensor)}
    return LoweredStep(*share_workspace(memory.instructions, kept, lasting), inputs, outputs)


def _own_storages(memory: StepMemory, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Let every output lie in a storage of its own, by a copy where it does not."""
    own: list[Tensor] = []
    for output in outputs:
        if not memory.is_own(output, own):
            copied = memory.keep(torch.empty_like(output, memory_format=torch.contiguous_format))
            RULES["aten.clone.default"](memory, copied, output)
            output = copied
        own.append(output)
    return own


class _Lowering(TorchDispatchMode):
    """Lets torch run each operation, and writes the instructions for it."""

    def __init__(self, memory: StepMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sources = [self._memory.meet(tensor) for tensor in _tensors((args, kwargs))]
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise StepNotCompiled(f"{target} draws random numbers")
        result = target(*args, **kwargs)
        results = list(_tensors(result))
        for tensor in results:
            if tensor.is_conj() or tensor.is_neg():
                raise StepNotCompiled(f"{target} gives a tensor that is conjugated or negated when it is read")
            self._memory.keep(tensor)
        if target._schema.is_mutable:
            self._lower_in_place(target, result, args, kwargs)
        elif str(target) in SHAPE_ONLY or all(map(self._memory.is_constant, sources)):
            for tensor in results:
                self._memory.constant(tensor)
        elif not results:
            raise StepNotCompiled(f"{target} gives a number that depends on the step")
        elif not all(map(self._memory.is_known, results)):
            self._rule(str(target))(self._memory, result, *args, **kwargs)
        return result

    def _lower_in_place(self, target: Any, result: Any, args: Any, kwargs: Any) -> None:
        """Use the rule that writes a new tensor, for numbers that are read before they are written."""
        if str(target) in VIEWED_ANEW:
            return
        if not (isinstance(result, Tensor) and result is args[0] and "_." in str(target)) or result.is_complex():
            raise StepNotCompiled(f"{target} changes tensors")
        self._rule(str(target).replace("_.", "."))(self._memory, result, *args, **kwargs)

    def _rule(self, name: str) -> Any:
        if name not in RULES:
            raise StepNotCompiled(f"there is no instruction for {name}")
        return RULES[name]


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
