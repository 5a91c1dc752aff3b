"""From a model's step to instructions: what torch is asked for is written down, run once and lowered in turn."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from recurra.decoding.instructions import Instruction
from recurra.decoding.lowering import RULES, SHAPE_ONLY, VIEWED_ANEW
from recurra.decoding.step_memory import StepMemory, StepNotCompiled


class LoweredStep(NamedTuple):
    """What a step came to."""

    instructions: list[Instruction]
    kept: list[Tensor]
    """The memory that the instructions name."""
    inputs: list[Tensor]
    outputs: list[Tensor]
    """The tensors whose places each call's own take."""


def lower_step(step: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> LoweredStep:
    """Record what `step` does with contiguous `inputs`, and write it down as instructions.

    Raises:
        StepNotCompiled: the step cannot be recorded, or has an operation for which there is no instruction.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a while to load

    inputs = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in inputs]
    memory = StepMemory(inputs)
    try:
        graph = make_fx(step)(*inputs)
        outputs = _own_storages(memory, _Lowering(graph, memory).run(*inputs))
    except StepNotCompiled:
        raise
    except Exception as error:  # whatever a tracer does not get through, or a rule does not foresee
        raise StepNotCompiled(f"the step cannot be recorded: {error}") from error
    return LoweredStep(memory.instructions, memory.workspace(), inputs, outputs)


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


class _Lowering(fx.Interpreter):
    """Runs a recorded step with real tensors, and writes the instructions for each operation behind it."""

    def __init__(self, graph: fx.GraphModule, memory: StepMemory) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.extra_traceback = False  # an error is told as it is, without the graph around it
        self._memory = memory

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._memory.constant(value) if isinstance(value, Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if target is operator.getitem:
            return result
        if not isinstance(target, torch._ops.OpOverload):
            raise StepNotCompiled(f"{target} is none of torch's operators")
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise StepNotCompiled(f"{target} draws random numbers")
        results = list(_tensors(result))
        for tensor in results:
            if tensor.is_conj() or tensor.is_neg():
                raise StepNotCompiled(f"{target} gives a tensor that is conjugated or negated when it is read")
            self._memory.keep(tensor)
        sources = list(_tensors((args, kwargs)))
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
