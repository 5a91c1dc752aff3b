"""From a model's step to a program: the step runs once, each operation is lowered to instructions, and the table
runs.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from recurra.decoding._instructions import ATTEND, LINEAR, PAST, UPDATE, C, Instruction, share_workspace, without_unused
from recurra.decoding._lowering import RULES, SHAPE_ONLY, VIEWED_ANEW
from recurra.decoding._team import address_of_yield, sync_words
from recurra.decoding._windows import Window
from recurra.decoding.memory import StepMemory, StepNotCompiled
from recurra.ops._toolkit.fork import is_forked_child
from recurra.state import Ragged, tensors

_Form = tuple[type, torch.Size, torch.dtype, torch.device, torch.layout]
"""What must be equal: a step is recorded for one of these per input. Strides and offsets may differ."""


def form_of(tensor: Any) -> _Form:
    """Describe a tensor; its class too, since tensors of other classes (fake ones) may have no memory."""
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout


def have_forms(inputs: Sequence[Any], forms: Sequence[_Form | None]) -> bool:
    """Tell whether inputs are tensors of these forms, one each; None stands for any."""
    return len(inputs) == len(forms) and all(
        form is None or (type(one) is form[0] and form_of(one) == form) for one, form in zip(inputs, forms)
    )


class StateForm:
    """How the states of a recorded step are nested, and the numbers in them.

    Args:
        like: one of them.
    """

    def __init__(self, like: Any) -> None:
        self._like = like

    def flatten(self, state: Any) -> list[Any] | None:
        """Give the tensors of a state, depth first; None if it is nested differently or has other numbers.

        In place of tensors whose sizes differ between the rows of the batch, it gives a `Ragged` of them. This runs in
        every step. For 12 layers it takes 6 us, where flattening by `torch.utils._pytree` takes 60.
        """
        found: list[Any] = []
        return found if _collect(state, self._like, found) else None

    def unflatten(self, flat: Sequence[Any]) -> Any:
        """Give the state of these tensors."""
        return _nested(self._like, iter(flat))


class FlatCall(nn.Module):
    """A call of a model, or of its method of this name, whose state goes in and out as a flat list of tensors."""

    def __init__(self, model: nn.Module, states: StateForm, method: str = "__call__") -> None:
        super().__init__()
        self.model, self._states, self._method = model, states, method

    def forward(self, tokens: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        y, state = getattr(self.model, self._method)(tokens, self._states.unflatten(flat))
        return (y, *tensors(state))


def _collect(state: Any, like: Any, found: list[Any]) -> bool:
    if isinstance(like, Tensor):
        found.append(state)
        return isinstance(state, (Tensor, Ragged))
    if isinstance(state, Ragged):
        rows: list[list[Any]] = [[] for _ in state.states]
        if not all(_collect(one, like, row) for one, row in zip(state.states, rows)):
            return False
        found += [_in_one(parts, model.shape[1:]) for parts, model in zip(zip(*rows), tensors(like))]
        return True
    if type(state) is not type(like):
        return False
    if isinstance(like, (tuple, list)):
        return len(state) == len(like) and all(_collect(part, model, found) for part, model in zip(state, like))
    return bool(state == like)


def _in_one(parts: Sequence[Tensor], shape: torch.Size) -> Any:
    return torch.cat(tuple(parts)) if all(part.shape[1:] == shape for part in parts) else Ragged(tuple(parts))


def _nested(like: Any, parts: Iterator[Any]) -> Any:
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
    windows: Sequence[Window] = ()


def lower_step(step: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> _LoweredStep:
    """Run `step` with copies of `inputs`, and write what it does down as instructions."""
    inputs = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in inputs]
    memory = StepMemory(inputs)
    try:
        with _Lowering(memory):
            outputs = [memory.meet(tensor) for tensor in step(*inputs)]
        outputs = _own_storages(memory, outputs)
        windows = _windows(memory, inputs, outputs)
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
    return _LoweredStep(*share_workspace(memory.instructions, kept, lasting), inputs, outputs, windows)


def _windows(memory: StepMemory, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Window]:
    """Find keys and values, which nothing but an ATTEND may read: in a call, a list of places stands for them."""
    entering, leaving = ([tensor.untyped_storage().data_ptr() for tensor in some] for some in (inputs, outputs))
    hidden = {storage for window in memory.windows for storage in window[:4]}
    for instruction in memory.instructions:
        seen = instruction.places if instruction.opcode != ATTEND else instruction.places[: C + 1]
        if not hidden.isdisjoint(place.storage for place in seen):
            raise StepNotCompiled("the step reads keys or values beside the attention to them")
    found = []
    for *storages, most in memory.windows:
        keys, values = map(entering.index, storages[:2])
        next_keys, next_values = map(leaving.index, storages[2:])
        found.append(Window(keys, values, next_keys, next_values, most, is_joint=inputs[keys].dim() == 3))
    return found


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
        self._memory = self.memory = memory


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


_CACHED = 2**26
"""Bytes of weights and states of which nothing may be left in a cache when the next step begins."""


class StepProgram:
    """Runs a lowered step. It has one workspace, so it serves one call at a time.

    Args:
        step: what to run.
    """

    def __init__(self, step: _LoweredStep) -> None:
        from recurra.decoding._attention_kernel import MOST_STEPS
        from recurra.decoding._step_kernel import run_share, step_kernel

        self._kernel, self._lock = step_kernel(), threading.Lock()
        self._run_share = run_share.address
        # What a call has to bring, and what it makes.
        self._windows, self._most_steps = step.windows, MOST_STEPS
        self._inputs = [torch.empty_like(tensor, device="meta") for tensor in step.inputs]  # without their memory
        self.is_window = [any(at in window[:2] for window in step.windows) for at in range(len(step.inputs))]
        self._forms = [None if is_window else form_of(tensor) for tensor, is_window in zip(step.inputs, self.is_window)]
        self._is_empty = [tensor.numel() == 0 for tensor in step.inputs]
        self._likes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in step.outputs]
        # The instructions, in which numbers of `_bases` stand for the memory of each call's inputs and outputs.
        moving = [tensor.untyped_storage().data_ptr() for tensor in (*step.inputs, *step.outputs)]
        numbers = {storage: number for number, storage in enumerate(moving, 1)}
        self._kept = [tensor for tensor in step.kept if tensor.untyped_storage().data_ptr() not in numbers]
        size = sum(tensor.untyped_storage().nbytes() for tensor in (*step.kept, *step.outputs))
        self._table = _table(step.instructions, numbers, PAST if size > _CACHED else 0)
        self._bases = np.zeros(len(moving) + 2, dtype=np.int64)  # the last one is no base: `missing`
        self._work, self._room_size = _sizes(step.instructions)
        self._room, self._sync = torch.zeros(0, dtype=torch.float32, device="cpu"), np.zeros(0, dtype=np.int64)

    def run(self, inputs: Sequence[Any]) -> list[Any] | None:
        """Compute the outputs, which are new tensors; keys and values may be `Ragged`.

        Returns:
            None if an input is not like that of the recording or has no memory that could
            be read, if another call is running, or if a token is not in the vocabulary.
        """
        if not have_forms(inputs, self._forms):
            return None
        if not all(window.fits(inputs, self._inputs, self._most_steps) for window in self._windows):
            return None
        inputs = [
            one if is_window else one.resolve_conj().resolve_neg().contiguous()
            for one, is_window in zip(inputs, self.is_window)
        ]
        places = [0 if is_window else one.data_ptr() for one, is_window in zip(inputs, self.is_window)]
        if not all(map(any, zip(places, self._is_empty, self.is_window))):
            return None  # zeros, or a tensor inside a function transform, whose numbers are nowhere yet
        if not self._lock.acquire(blocking=False):
            return None
        try:
            outputs: list[Any] = [torch.empty_strided(*like[:2], dtype=like[2], device="cpu") for like in self._likes]
            made = [tensor.data_ptr() for tensor in outputs]
            tables = [window.advance(inputs, outputs) for window in self._windows]
            for window, table in zip(self._windows, tables):
                places[window.keys] = table.buffer_info()[0]
            self._bases[1:] = [*places, *made, 0]
            self._execute()
            return None if self._bases[-1] else outputs
        finally:
            self._lock.release()

    def _execute(self) -> None:
        """Run the table over the memory that `_bases` names, whose last number says whether a token was missing."""
        jobs = 1 if is_forked_child() else torch.get_num_threads()
        if len(self._sync) < sync_words(jobs):
            self._room = self._room.new_empty(jobs * self._room_size // 4)
            self._sync = np.zeros(sync_words(jobs), dtype=np.int64)
        addresses = self._table.ctypes.data, len(self._table), self._bases.ctypes.data
        room = self._room.data_ptr(), self._room_size
        missing = addresses[2] + 8 * (len(self._bases) - 1)
        self._sync.fill(0)
        meet = self._sync.ctypes.data, address_of_yield()
        self._kernel(self._run_share, *addresses, missing, *room, *meet, jobs, jobs=jobs, work=self._work)


def _table(instructions: Sequence[Instruction], numbers: dict[int, int], past: int) -> np.ndarray:
    """The instructions as rows of numbers; those with a kernel of their own name its address as their kind."""
    from recurra.decoding._attention_kernel import attend_share
    from recurra.decoding._matvec import multiply_share

    kinds: dict[int, Callable[[int], int]] = {
        LINEAR: lambda kind: multiply_share[kind].address,
        ATTEND: lambda _: attend_share.address,
        UPDATE: lambda kind: kind if kind & 2 else kind + past,
    }
    named = [one._replace(kind=kinds.get(one.opcode, int)(one.kind)) for one in instructions]
    return np.array([one.row(numbers) for one in named], dtype=np.int64)


def _sizes(instructions: Sequence[Instruction]) -> tuple[int, int]:
    """The largest product, which decides on the number of threads, and the bytes of room that each thread needs."""
    from recurra.decoding._attention_kernel import padded
    from recurra.decoding._matvec import room_bytes

    sizes = [one.sizes[:3] for one in instructions if one.opcode == LINEAR]
    matrices = [one.sizes[1] * one.sizes[2] for one in instructions if one.opcode == UPDATE and one.kind & 2]
    most, widest = (max((size[at] for size in sizes), default=1) for at in (0, 1))
    room = room_bytes(most, widest) + 4 * max((padded(size) for size in matrices), default=0)
    return max((n_in * n_out for _, n_in, n_out in sizes), default=0), room
