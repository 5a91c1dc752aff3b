"""A compiled step while it is being written: its instructions, and the memory that they read and write.

Every tensor of the recorded step exists while the instructions are written, and is kept as their workspace. So an
operand is an address, a view is another address into the same storage, and nothing is copied into a new layout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recurra.decoding._instructions import (
    ATTEND,
    CHOOSE,
    DIMENSIONS,
    FUNCTIONS,
    LINEAR,
    LOOK_UP,
    MAP,
    NORMALISE,
    REPEAT,
    SELECT,
    UPDATE,
    G,
    Instruction,
    Place,
)
from recurra.decoding._windows import Attention
from recurra.decoding.linear import describe_weights


class StepNotCompiled(ValueError):
    """A step has an operation, or a tensor, for which there is no instruction."""


class StepMemory:
    """The instructions in order, and what is known about storages.

    Args:
        inputs: the tensors that each call brings anew.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.instructions: list[Instruction] = []
        self.kept: list[Tensor] = []
        self._constant: set[int] = set()
        self._written = {_storage(tensor) for tensor in inputs}
        self._inputs = set(self._written)
        self._met = set(self._written)
        self._codes: dict[int, Tensor] = {}
        self.compared: dict[int, Tensor] = {}
        """What is above 0 where a tensor of truth values, named by its storage, is true."""
        self.windows: list[list[Any]] = []
        """The storages of keys and values that an ATTEND reads and gives, and how many steps the latter may have."""

    def keep(self, tensor: Tensor) -> Tensor:
        """Keep a tensor's storage alive, whatever happens to the tensor (a parameter's data may be replaced)."""
        self.kept.append(tensor.detach())
        self._met.add(_storage(tensor))
        return tensor

    def meet(self, tensor: Tensor) -> Tensor:
        """Take a tensor that the step uses: one that it neither got nor made, such as a weight, is a constant."""
        return tensor if _storage(tensor) in self._met else self.constant(tensor)

    def constant(self, value: Tensor | float | complex) -> Tensor:
        """Declare a tensor or number to be the same in every call."""
        if not isinstance(value, Tensor):  # not of the type and on the device that torch makes tensors of by default
            number = torch.complex64 if isinstance(value, complex) else torch.float32
            value = torch.tensor(value, dtype=number, device="cpu")
        tensor = self.keep(value)
        self._constant.add(_storage(tensor))
        return tensor

    def scratch(self, shape: Sequence[int]) -> Tensor:
        """Make room for an intermediate result."""
        return self.keep(torch.empty(tuple(shape), dtype=torch.float32, device="cpu"))

    def is_constant(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is the same in every call."""
        return tensor.numel() == 0 or _storage(tensor) in self._constant

    def is_known(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's storage is an input, a constant, or written by an instruction."""
        return self.is_constant(tensor) or _storage(tensor) in self._written

    def is_result(self, tensor: Tensor) -> bool:
        """Tell whether instructions write the storage and this tensor covers all of it."""
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return whole and _storage(tensor) in self._written - self._inputs

    def is_own(self, tensor: Tensor, others: Sequence[Tensor]) -> bool:
        """Tell whether `is_result` holds and none of `others` lies in the same storage."""
        return self.is_result(tensor) and _storage(tensor) not in map(_storage, others)

    def workspace(self) -> list[Tensor]:
        """Give the kept tensors that an instruction names."""
        named = {place.storage for instruction in self.instructions for place in instruction.places}
        return list({_storage(tensor): tensor for tensor in self.kept if _storage(tensor) in named}.values())

    def map(self, function: str, out: Tensor, a: Tensor | float, b: Tensor | float | None = None) -> None:
        """Write out = function(a, b) in float32, with a and b broadcast to out."""
        a = a if isinstance(a, Tensor) else self.constant(float(a))
        b = a if b is None else b if isinstance(b, Tensor) else self.constant(float(b))
        if out.numel() == 0:
            return
        operands = [out, self._beside(out, a), self._beside(out, b)]
        _require_floats(*operands)
        sizes, strides = _collapsed(operands)
        places = [self._output(out), self._place(operands[1]), self._place(operands[2])]
        self.instructions.append(Instruction(MAP, FUNCTIONS.index(function), places, sizes, strides))

    def reduce(self, function: str, out: Tensor, a: Tensor, start: float) -> None:
        """Write the reduction of `a` by `function`, from `start`, along the dimensions where `out` has size 1."""
        self.map("copy", out, start)
        gathered = out.expand(a.shape)
        self.map(function, gathered, gathered, a)

    def repeat(self, turns: int, write: Callable[[int], None]) -> None:
        """Write the maps of `write(0)`, `write(1)` and so on, whose operands lie the same distance apart each time.

        Scratch and constants must be made before.
        """
        start = len(self.instructions)
        for turn in range(min(turns, 2)):
            write(turn)
        if turns < 2:
            return
        written, self.instructions = self.instructions[start:], self.instructions[:start]
        count = len(written) // 2
        self.instructions.append(Instruction(REPEAT, 0, [], [count, turns]))
        self.instructions += [_repeated(*pair) for pair in zip(written[:count], written[count:], strict=True)]

    def linear(self, out: Tensor, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> None:
        """Write out = scale (weight x) + bias for every row of x."""
        try:
            kind, n_in, n_out = describe_weights(weight, x.shape[-1], len(scale))
        except ValueError as error:
            raise StepNotCompiled(f"a matrix cannot be used: {error}") from error
        x, scale, bias = self._in_rows(x), self._in_rows(scale), self._in_rows(bias)
        _require_floats(out, x, scale, bias)
        if not out.is_contiguous():
            raise StepNotCompiled("the rows of a matrix product do not lie side by side")
        places = [self._output(out), *map(self._place, (x, weight, scale, bias))]
        self.instructions.append(Instruction(LINEAR, kind, places, [x.numel() // n_in, n_in, n_out]))

    def linear_of(self, out: Tensor, x: Tensor, weights: Tensor, scales: Tensor, bias: Tensor, number: Tensor) -> None:
        """Write out = scale (weight x) + bias for one vector, with the weight and scale that the int64 `number` names.

        All are contiguous; scales are (matrices, outputs).
        """
        kind, n_in, n_out = describe_weights(weights[0], x.shape[-1], scales.shape[1])
        places = [self._output(out), *map(self._place, (x, weights, scales, bias, number))]
        apart = weights.stride(0) * weights.element_size()
        self.instructions.append(Instruction(LINEAR, kind, places, [1, n_in, n_out, apart]))

    def choose(self, values: Tensor, numbers: Tensor, x: Tensor) -> None:
        """Write the largest numbers of every row, as many as `values` has, and where they are."""
        x = self._in_rows(x)
        _require_floats(values, x)
        place = self._place(x)
        places = [self._output(values), *[place] * (G - 1), self._output(numbers)]
        sizes = [x.numel() // x.shape[-1], x.shape[-1], values.shape[-1]]
        self.instructions.append(Instruction(CHOOSE, 0, places, sizes))

    def normalise(self, out: Tensor, x: Tensor, width: int, weight: Tensor, bias: Tensor, small: float) -> None:
        """Write a layer norm over rows of `width`."""
        x, weight, bias = self._in_rows(x), self._in_rows(weight), self._in_rows(bias)
        _require_floats(out, x, weight, bias)
        if not out.is_contiguous():
            raise StepNotCompiled("the rows of a layer norm do not lie side by side")
        places = [self._output(out), *map(self._place, (x, weight, bias, self.constant(float(small))))]
        self.instructions.append(Instruction(NORMALISE, 0, places, [x.numel() // width, width]))

    def look_up(self, out: Tensor, table: Tensor, rows: Tensor) -> None:
        """Write chosen rows of a table."""
        _require_floats(out, table)
        if rows.dtype != torch.int64 or not (rows.is_contiguous() and out.is_contiguous() and table.is_contiguous()):
            raise StepNotCompiled(f"row numbers are {rows.dtype}, or rows do not lie side by side")
        places = [self._output(out), self._place(rows), self._place(table)]
        sizes = [rows.numel(), table.shape[1], table.shape[0]]
        self.instructions.append(Instruction(LOOK_UP, 0, places, sizes))

    def select(
        self, y: Tensor, last: Tensor, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, h: Tensor
    ) -> None:
        """Write a selective scan (see `recurra.ops.selective_scan`)."""
        operands = [self._in_rows(tensor) for tensor in (x, step, a.t(), b, c, h)]
        _require_floats(y, last, *operands)
        places = [self._output(y), *map(self._place, operands), self._output(last)]
        self.instructions.append(Instruction(SELECT, 0, places, [*x.shape, a.shape[1]]))

    def update(
        self,
        y: Tensor,
        last: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        state: Tensor,
        b: Tensor | None = None,
        others: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write one step of matrices (N, d_k, d_v) that decay and take k^T v, or follow the delta rule with rates b.

        All are dense, with N first. `others` are two keys of the generalised delta rule: what is read with the
        first is written with the second.
        """
        _require_floats(y, last, q, k, v, a, state)
        entering = self._codes.get(_storage(state), state)
        more = q if b is None else b
        if others is not None:
            more = self.scratch((len(state), 2, k.shape[-1]))
            for part, keys in zip(more.unbind(1), others):
                self.map("copy", part, keys)
        operands = (q, k, v, a, entering, more)
        places = [self._output(y), *map(self._place, operands), self._output(last)]
        size = entering.element_size() * entering.numel() // len(state)
        kind = int(b is not None) + 2 * (entering is not state) + 4 * (others is not None)
        self.instructions.append(Instruction(UPDATE, kind, places, [*state.shape, a.shape[-1]], ([size],)))

    def decode(self, state: Tensor, codes: Tensor) -> None:
        """Note that matrices stand for codes, which the step gets: only an `update` can read them."""
        self._met.add(_storage(self.keep(state)))
        self._codes[_storage(state)] = codes

    def encode(self, state: Tensor, codes: Tensor) -> None:
        """Let the `update` that gives matrices give their codes instead."""
        given = [at for at, one in enumerate(self.instructions) if _storage(state) in [p.storage for p in one.places]]
        if len(given) != 1 or not self.instructions[given[0]].kind & 2 or not self.is_result(state):
            raise StepNotCompiled("a state in int16 is not only that of one recurrence")
        update = self.instructions[given[0]]
        self.instructions[given[0]] = update._replace(places=[*update.places[:-1], self._output(self.keep(codes))])

    def attend(
        self, y: Tensor, after: Any, queries: Tensor, keys: Tensor, values: Tensor, state: Any, kind: Attention
    ) -> None:
        """Write attention y (B, 1, H, d) of one step and the state after it (see `RotaryAttention.attend`)."""
        from recurra.decoding._attention_kernel import rotations, scratch_floats

        n_rows, _, n_heads, d_head = queries.shape
        n_kv_heads, past = keys.shape[2], state[0]
        if not {_storage(part) for part in state} <= self._inputs or queries.dtype != torch.float32:
            raise StepNotCompiled("keys and values are not the step's inputs, or queries are not float32")
        if not past.numel():
            raise StepNotCompiled("a window of one step keeps no keys")
        turns = rotations(d_head, kind.n_rotated, kind.rotation_base)
        scaled = self.scratch(queries.shape)
        self.map("mul", scaled, queries, kind.scale)
        room = self.scratch((n_rows * n_kv_heads, scratch_floats(n_heads // n_kv_heads, d_head)))
        operands = [scaled, self._in_rows(keys), self._in_rows(values), past, self.constant(turns), room]
        self._written.add(_storage(room))
        places = [self._output(self.keep(y)), *map(self._place, operands)]
        head = past.shape[-1] if past.dtype == torch.int8 else 4 * d_head
        self.instructions.append(Instruction(ATTEND, 0, places, [n_rows, n_heads, n_kv_heads, d_head], ([head],)))
        self._written.update(_storage(self.keep(part)) for part in after)
        self.windows.append([*(_storage(part) for part in (*state, *after)), kind.most_steps])

    def _beside(self, out: Tensor, x: Tensor) -> Tensor:
        """Expand x to the shape of `out`; a constant is copied first if its numbers do not lie side by side."""
        if self.is_constant(x) and 0 not in x.stride():
            x = self._in_rows(x)
        return x.expand(out.shape)

    def _in_rows(self, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return tensor
        if self.is_constant(tensor):
            return self.constant(tensor.contiguous())
        copied = self.scratch(tensor.shape)
        self.map("copy", copied, tensor)
        return copied

    def _place(self, tensor: Tensor) -> Place:
        if not self.is_known(tensor):
            raise StepNotCompiled("the step uses a result that no instruction gives")
        if tensor.device.type != "cpu":
            raise StepNotCompiled(f"a tensor is on {tensor.device}; instructions run on the CPU")
        return _place(tensor)

    def _output(self, tensor: Tensor) -> Place:
        if _storage(tensor) in self._constant | self._inputs:
            raise StepNotCompiled("the step changes a constant or its input")
        self._written.add(_storage(tensor))
        return _place(tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: Tensor) -> Place:
    return Place(_storage(tensor), int(tensor.storage_offset()) * tensor.element_size())


def _repeated(instruction: Instruction, following: Instruction) -> Instruction:
    """Give an instruction whose places move as from it to that of the next turn."""
    distances = [after.offset - place.offset for place, after in zip(instruction.places, following.places)]
    back = [after._replace(offset=after.offset - distance) for after, distance in zip(following.places, distances)]
    if instruction.opcode != MAP or instruction != following._replace(places=back):
        raise StepNotCompiled("turns of a repetition differ in more than where their operands lie")
    return instruction._replace(places=[place._replace(turn=by) for place, by in zip(instruction.places, distances)])


def _require_floats(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.is_neg():
            raise StepNotCompiled(f"a tensor is {tensor.dtype}; instructions compute in float32")


def _collapsed(operands: list[Tensor]) -> tuple[list[int], tuple[list[int], ...]]:
    """Give sizes and strides in bytes, the innermost dimension first, of as few dimensions as possible."""
    shape = operands[0].shape
    dims = [(shape[d], *(4 * x.stride(d) for x in operands)) for d in range(len(shape)) if shape[d] != 1]
    dims.sort(key=lambda dim: (dim[1] == 0, dim[1]))
    if not dims or dims[0][1] == 0:
        dims.insert(0, (1, 0, 0, 0))
    merged = dims[:1]
    for dim in dims[1:]:
        size, *inner = merged[-1]
        if size == 1 or [size * stride for stride in inner] != list(dim[1:]):
            merged.append(dim)
        else:
            merged[-1] = (size * dim[0], *inner)
    if len(merged) > DIMENSIONS:
        raise StepNotCompiled(f"an operation walks through memory in {len(merged)} dimensions; at most {DIMENSIONS}")
    sizes, *strides = (list(part) for part in zip(*merged))
    return sizes, tuple(strides)
