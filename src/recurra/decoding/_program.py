"""From a model's step to a program: the step runs once, each operation is lowered to instructions, and the table
runs.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from recurra.decoding._instructions import LINEAR, Instruction, share_workspace, without_unused
from recurra.decoding._lowering import RULES, SHAPE_ONLY, VIEWED_ANEW
from recurra.decoding.memory import StepMemory, StepNotCompiled
from recurra.ops._toolkit.fork import is_forked_child

_Form = tuple[type, torch.Size, torch.dtype, torch.device, torch.layout]
"""What must be equal: a step is recorded for one of these per input. Strides and offsets may differ."""


def form_of(tensor: Tensor) -> _Form:
    """Describe a tensor; its class too, since tensors of other classes (fake ones) may have no memory."""
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout


def have_forms(tensors: Sequence[Tensor], forms: Sequence[_Form]) -> bool:
    """Tell whether the tensors have these forms, one each."""
    return len(tensors) == len(forms) and all(form_of(tensor) == form for tensor, form in zip(tensors, forms))


class StateForm:
    """How the states of a recorded step are nested, and the numbers in them.

    Args:
        like: one of them.
    """

    def __init__(self, like: Any) -> None:
        self._like = like

    def flatten(self, state: Any) -> list[Tensor] | None:
        """Give the tensors of a state, depth first; None if it is nested differently or has other numbers.

        This runs in every step. For 12 layers it takes 6 us, where flattening by `torch.utils._pytree` takes 60.
        """
        found: list[Tensor] = []
        return found if _collect(state, self._like, found) else None

    def unflatten(self, flat: Sequence[Tensor]) -> Any:
        """Give the state of these tensors."""
        return _nested(self._like, iter(flat))


def _collect(state: Any, like: Any, found: list[Tensor]) -> bool:
    if isinstance(like, Tensor):
        found.append(state)
        return isinstance(state, Tensor)
    if type(state) is not type(like):
        return False
    if isinstance(like, (tuple, list)):
        return len(state) == len(like) and all(_collect(part, model, found) for part, model in zip(state, like))
    return bool(state == like)


def _nested(like: Any, parts: Iterator[Tensor]) -> Any:
    if isinstance(like, Tensor):
        return next(parts)
    if not isinstance(like, (tuple, list)):
        return like
    inner = [_nested(part, parts) for part in like]
    return type(like)(*inner) if hasattr(like, "_fields") else type(like)(inner)


class _LoweredStep(NamedTuple):
    """A step as instructions."""

    instructions: list[Instruction]
    kept: list[Tensor]
    """The memory that the instructions name."""
    inputs: list[Tensor]
    outputs: list[Tensor]
    """The tensors whose places each call's own take."""


def lower_step(step: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> _LoweredStep:
    """Run `step` with copies of `inputs`, and write what it does down as instructions."""
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
    memory.instructions = without_unused(
        memory.instructions, {tensor.untyped_storage().data_ptr() for tensor in outputs}
    )
    moving = {tensor.untyped_storage().data_ptr() for tensor in (*inputs, *outputs)}
    kept = memory.workspace()
    lasting = moving | {tensor.untyped_storage().data_ptr() for tensor in kept if memory.is_constant(tensor)}
    return _LoweredStep(*share_workspace(memory.instructions, kept, lasting), inputs, outputs)


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


class _Recorder:
    """Lets torch run each operation, and writes the instructions for it."""

    _memory: StepMemory

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


class _Lowering(_Recorder, TorchDispatchMode):
    """The mode, which inherits its method: torch wraps one that a mode defines, and loads its compiler, for seconds."""

    def __init__(self, memory: StepMemory) -> None:
        super().__init__()
        self._memory = memory


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


class StepProgram:
    """Runs a lowered step. It has one workspace, so it serves one call at a time.

    Args:
        step: what to run.
    """

    def __init__(self, step: _LoweredStep) -> None:
        from recurra.decoding._matvec import multiply_share, room_bytes
        from recurra.decoding._step_kernel import run_share, step_kernel

        self._kernel, self._lock = step_kernel(), threading.Lock()
        self._run_share = run_share.address
        moving = [tensor.untyped_storage().data_ptr() for tensor in (*step.inputs, *step.outputs)]
        numbers = {storage: number for number, storage in enumerate(moving, 1)}
        rows = [
            instruction._replace(kind=multiply_share[instruction.kind].address).row(numbers)
            if instruction.opcode == LINEAR
            else instruction.row(numbers)
            for instruction in step.instructions
        ]
        self._kept = [tensor for tensor in step.kept if tensor.untyped_storage().data_ptr() not in numbers]
        self._table = np.array(rows, dtype=np.int64)
        self._bases = np.zeros(len(moving) + 2, dtype=np.int64)  # the last one is no base: `missing`
        self._forms = [form_of(tensor) for tensor in step.inputs]
        self._is_empty = [tensor.numel() == 0 for tensor in step.inputs]
        self._likes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in step.outputs]
        sizes = [step_row.sizes[:3] for step_row in step.instructions if step_row.opcode == LINEAR]
        self._work = max((n_in * n_out for _, n_in, n_out in sizes), default=0)
        most, widest = (max((size[at] for size in sizes), default=1) for at in (0, 1))
        self._room_size = room_bytes(most, widest)
        self._room = torch.zeros(0, dtype=torch.float32, device="cpu")

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Compute the outputs, which are new tensors.

        Returns:
            None if an input is not like that of the recording or has no memory that could
            be read, if another call is running, or if a token is not in the vocabulary.
        """
        if not have_forms(inputs, self._forms):
            return None
        inputs = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in inputs]
        places = [tensor.data_ptr() for tensor in inputs]
        if not all(place or is_empty for place, is_empty in zip(places, self._is_empty)):
            return None  # zeros, or a tensor inside a function transform, whose numbers are nowhere yet
        if not self._lock.acquire(blocking=False):
            return None
        try:
            outputs = [torch.empty_strided(*like[:2], dtype=like[2], device="cpu") for like in self._likes]
            self._bases[1:-1] = [*places, *(tensor.data_ptr() for tensor in outputs)]
            self._bases[-1] = 0
            jobs = 1 if is_forked_child() else torch.get_num_threads()
            if len(self._room) < jobs * self._room_size // 4:
                self._room = self._room.new_zeros(jobs * self._room_size // 4)
            addresses = self._table.ctypes.data, len(self._table), self._bases.ctypes.data
            room = self._room.data_ptr(), self._room_size
            missing = addresses[2] + 8 * (len(self._bases) - 1)
            self._kernel(self._run_share, *addresses, missing, *room, jobs, jobs=jobs, work=self._work)
            return None if self._bases[-1] else outputs
        finally:
            self._lock.release()
