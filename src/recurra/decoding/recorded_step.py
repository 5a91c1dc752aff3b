"""Single steps as a recorded program: what a model does for one token, without the Python around it.

A step of a small recurrent model is about a hundred short operations, and Python takes longer between them than they
do. Here the model's own forward runs once under `torch.jit.trace`, which writes down its operations; later steps run
that list. There is no second way of stepping: the recording comes from the model and is compared with it.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from recurra.checks import require_at_least, sentence
from recurra.decoding.linear import MOST_VECTORS
from recurra.decoding.step_inputs import StateForm, form_of, have_forms
from recurra.decoding.step_memory import StepNotCompiled
from recurra.state import tensors

MOST_ROWS = 4 * MOST_VECTORS
"""Rows of the largest batch that runs recorded steps, in pieces; above it torch's products over all rows are faster."""

_EXACT = 8
"""Rows up to which each batch has a recording of its own."""

_CHECKED_STEPS = 3


class StepNotSteady(ValueError):
    """A model's steps cannot be recorded."""


class Program(Protocol):
    """A step for one batch size, recorded."""

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Give logits and state from tokens and state, all as flat lists; None for inputs that it does not take."""
        ...


class RecordedStep(nn.Module):
    """A model in evaluation mode that runs one token per row from a recording, and everything else itself.

    The step of one row is recorded at construction, those of larger batches when they first occur: of 2 to 8 rows, and
    of 12, 16 and so on to `MOST_VECTORS`. A batch between two of these is filled up with copies of its last row, so
    that streams that come and go do not need a recording each; batches of up to `MOST_ROWS` rows run in pieces of
    `MOST_VECTORS`. All other inputs go through the model: several tokens per row, the first step of a stream, and
    tokens or states that are not what the model gave when the step was recorded (the model refuses those that do not
    fit it).
    The model's weights must not change. Its attributes (`config`, `head`) are found here too.

    Args:
        model: called as `model(tokens, state) -> (logits, state)`.
        vocab_size: tokens are below it; a few are drawn to record the step and to check it.

    Raises:
        ValueError: the model is in training mode.
        StepNotSteady: a step cannot be recorded, because it depends on numbers in the state that are not tensors (a
            position that counts up) or because the state grows. It is a ValueError.
    """

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        super().__init__()
        require_at_least(1, vocab_size=vocab_size)
        if model.training:
            came = f"a {type(model).__name__} in training mode"
            raise ValueError(sentence("model", came, "one in evaluation mode", "call model.eval() first"))
        self.model, self.vocab_size = model, vocab_size
        like, program = self._made_for(1)
        self._states = StateForm(like)
        self._programs: dict[int, Program | None] = {1: program}
        self._recording = threading.Lock()
        self.eval()

    def forward(self, tokens: Int[Tensor, "B L"], state: Any = None) -> tuple[Float[Tensor, "B L V"], Any]:
        """Give the logits after every token, continuing from `state`; None is the start of a stream."""
        results = None
        if state is not None and tokens.ndim == 2 and tokens.shape[1] == 1 and not torch.is_grad_enabled():
            flat = self._states.flatten(state)
            results = None if flat is None else self._run([tokens, *flat])
        if results is None:
            return self.model(tokens, state)
        return results[0], self._states.unflatten(results[1:])

    def _run(self, inputs: list[Tensor]) -> list[Tensor] | None:
        """Run recorded steps for tokens and the tensors of a state; None for what they do not take."""
        rows = len(inputs[0])
        if rows <= _EXACT:
            program = self.program(rows)
            return None if program is None else program.run(inputs)
        if rows > MOST_ROWS or not all(map(_are_rows, inputs, repeat(rows))):
            return None
        done = []
        for piece in zip(*(tensor.split(MOST_VECTORS) for tensor in inputs)):
            results = self._run_filled_up(piece)
            if results is None:
                return None
            done.append(results)
        return done[0] if len(done) == 1 else [torch.cat(parts) for parts in zip(*done)]

    def _run_filled_up(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        rows = len(inputs[0])
        size = recorded_rows(rows)
        program = self.program(size)
        if program is None:
            return None
        if size == rows:
            return program.run(inputs)
        results = program.run(
            [torch.cat((tensor, tensor[-1:].expand(size - rows, *tensor.shape[1:]))) for tensor in inputs]
        )
        return None if results is None else [tensor[:rows] for tensor in results]

    def program(self, batch: int) -> Program | None:
        """Give the recorded step of this many rows, recorded now if need be; None if there is none."""
        if batch not in self._programs and 0 < batch <= MOST_VECTORS and batch == recorded_rows(batch):
            with self._recording:  # other threads wait for it instead of recording it too
                if batch not in self._programs:
                    self._programs[batch] = self._made_or_none(batch)
        return self._programs.get(batch)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def __reduce__(self) -> tuple:
        """A copy makes its own recordings: they belong to the tensors of this one."""
        return type(self), (self.model, self.vocab_size)

    def _made_or_none(self, batch: int) -> Program | None:
        try:
            return self._made_for(batch)[1]
        except (StepNotSteady, StepNotCompiled):
            return None

    def _made_for(self, batch: int) -> tuple[Any, Program]:
        """Record a step of this many rows and check it; give a state of it, and the program."""
        device = next(iter((*self.model.parameters(), *self.model.buffers()))).device
        generator = torch.Generator().manual_seed(0)
        size = (_CHECKED_STEPS + 2, batch, 1)
        tokens = torch.randint(self.vocab_size, size, device="cpu", generator=generator).to(device)
        # in the types of the model: a caller's autocast must not stay in what later calls run
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            _, like = self.model(tokens[0])
            _require_steady(like, self.model(tokens[1], like)[1])
            program = self._record(tokens[1], like)
            self._check(program, tokens[1:], like)
        return like, program

    def _record(self, tokens: Tensor, like: Any) -> Program:
        inputs = [tokens, *tensors(like)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about decisions in Python during the recording, which _check covers
            try:
                recording = torch.jit.trace(FlatStep(self.model, like).eval(), tuple(inputs), check_trace=False)
                return TracedProgram(torch.jit.freeze(recording), inputs)
            except Exception as error:  # whatever a model does with sizes, which are tensors in here
                raise StepNotSteady(f"a step of {type(self.model).__name__} cannot be recorded: {error}") from error

    def _agrees(self, mine: Tensor, right: Tensor) -> bool:
        return torch.equal(mine, right)

    def _check(self, program: Program, tokens: Tensor, like: Any) -> None:
        mine, expected = list(tensors(like)), like
        for row in tokens:
            results = program.run([row, *mine])
            right, expected = self.model(row, expected)
            if results is None or not all(map(self._agrees, results, (right, *tensors(expected)))):
                raise StepNotSteady(
                    f"a recorded step of {type(self.model).__name__} gives other numbers than the model"
                )
            mine = self._carried(results[1:], expected)

    def _carried(self, mine: list[Tensor], expected: Any) -> list[Tensor]:
        """Give the state from which the next checked step begins."""
        return mine


def recorded_rows(rows: int) -> int:
    """Give the smallest number of rows, at least these, that has a recording."""
    unit = 1 if rows <= _EXACT else 4 if rows <= 4 * _EXACT else 8
    return -(-rows // unit) * unit


def _are_rows(tensor: Tensor, rows: int) -> bool:
    return tensor.layout == torch.strided and tensor.shape[:1] == (rows,)


class TracedProgram:
    """A step recorded by `torch.jit.trace`.

    Args:
        recording: the traced step.
        inputs: those that it was traced with.
    """

    def __init__(self, recording: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
        self._recording, self._forms = recording, [form_of(tensor) for tensor in inputs]

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Run the recording; None if the inputs are not like those of the recording."""
        return list(self._recording(*inputs)) if have_forms(inputs, self._forms) else None


class FlatStep(nn.Module):
    """A model whose state goes in and out as a flat list of tensors.

    Args:
        model: the model.
        like: a state of it, which gives the structure.
    """

    def __init__(self, model: nn.Module, like: Any) -> None:
        super().__init__()
        self.model, self._states = model, StateForm(like)

    def forward(self, tokens: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        """Run one step."""
        logits, state = self.model(tokens, self._states.unflatten(flat))
        return (logits, *tensors(state))


def _require_steady(before: Any, after: Any) -> None:
    """Refuse a step that changes more of a state than the values of its tensors."""
    if _outline(before) != _outline(after):
        raise StepNotSteady(
            "the model's steps cannot be recorded: from one to the next, more of its state changes than the values of "
            "its tensors (a position that counts up, or a window that grows)"
        )


def _outline(state: Any) -> Any:
    """Put the shape and type of each tensor of a state in its place."""
    if isinstance(state, Tensor):
        return tuple(state.shape), state.dtype
    return [_outline(part) for part in state] if isinstance(state, (tuple, list)) else state
