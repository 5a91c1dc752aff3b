"""Language models as torch.export programs: the state comes in and goes out; nothing is kept between calls."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves_with_path

from recurra.export.exportable import require_exportable
from recurra.models import LanguageModelShell
from recurra.state import map_tensors, tensors

_ENDLESS = 10**9
_BATCH, _LENGTH = 2, 5  # of what is traced with where they may be any: not 1, which torch takes for a constant


class StateTensor(NamedTuple):
    """A tensor of a model's state, as it enters and leaves a program."""

    name: str
    """The path to it: layers.0.h."""
    shape: tuple[int, ...]
    """Its shape without the batch, which comes first. A complex tensor ends in 2: real and imaginary part."""
    is_complex: bool
    """Whether it is complex in the model."""


class StreamProgram(NamedTuple):
    """A traced model: `program.module()(tokens, *state) -> (logits, *state)`, tokens (B, L) and logits (B, L, V).

    Its state tensors are those of `state`, in this order; complex ones are real tensors that end in 2 (`view_as_real`).
    A stream starts from zeros.
    """

    program: ExportedProgram
    state: tuple[StateTensor, ...]


def prefill_program(model: LanguageModelShell, *, batch: int | None = 1) -> StreamProgram:
    """Trace a model for any number of tokens from 2 on; `step_program` traces it for one.

    The program calls the kernels of this package, so `import recurra` before `torch.export.load`.

    Args:
        model: a language model on the CPU, in float32.
        batch: number of streams; None for any number from 2 on.

    Raises:
        ValueError: the model cannot be exported; the message says why.
    """
    return trace(model, batch, None)


def step_program(model: LanguageModelShell, *, batch: int | None = 1) -> StreamProgram:
    """Trace a model for one token of every stream, tokens (B, 1); otherwise as `prefill_program`."""
    return trace(model, batch, 1)


def state_tensors(model: LanguageModelShell) -> tuple[StateTensor, ...]:
    """List the tensors of a model's state."""
    return tuple(
        StateTensor(name, tuple(x.shape[1:]) + ((2,) if x.is_complex() else ()), x.is_complex())
        for name, x in _named(model.initial_state(1))
    )


def zero_state(state: tuple[StateTensor, ...], batch: int) -> list[Tensor]:
    """Return the state of `batch` streams at their start."""
    return [torch.zeros(batch, *tensor.shape) for tensor in state]


class FlatModel(nn.Module):
    """A language model whose state is a list of real tensors."""

    def __init__(self, model: LanguageModelShell) -> None:
        super().__init__()
        self.model = model
        self._structure = model.initial_state(1)

    def forward(self, tokens: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the logits and the next state."""
        given = iter(state)
        entering = map_tensors(
            lambda like: torch.view_as_complex(next(given)) if like.is_complex() else next(given), self._structure
        )
        logits, last = self.model(tokens, entering)
        return logits, *(torch.view_as_real(x) if x.is_complex() else x for x in tensors(last))


def trace(
    model: LanguageModelShell, batch: int | None, length: int | None, flat: type[FlatModel] = FlatModel
) -> StreamProgram:
    """Trace a model, as `flat` calls it, for any or one number of streams and tokens.

    Raises:
        ValueError: the model cannot be exported; the message says why.
    """
    require_exportable(model)
    if batch is not None and batch < 1:
        raise ValueError(f"batch is {batch}; expected at least 1, or None for any number of streams")
    state = state_tensors(model)
    n_streams = _BATCH if batch is None else batch
    tokens = torch.zeros(n_streams, _LENGTH if length is None else length, dtype=torch.int64)
    of_state = {0: Dim.DYNAMIC} if batch is None else {}
    of_tokens = of_state | ({1: Dim.DYNAMIC} if length is None else {})
    was_training = model.training
    try:
        with torch.no_grad():
            program = torch.export.export(
                flat(model).eval(),
                (tokens, *zero_state(state, n_streams)),
                dynamic_shapes=(of_tokens, tuple(of_state for _ in state)),
                strict=False,
            )
    except Exception as error:  # whatever a mixer that is not of this package may do
        raise ValueError(f"{_description(model)} cannot be traced for any number of tokens: {error}") from error
    finally:
        model.train(was_training)
    for bounds in program.range_constraints.values():
        if bounds.lower > _BATCH or bounds.upper < _ENDLESS:
            raise ValueError(
                f"{_description(model)} has a graph for {bounds.lower} to {bounds.upper} tokens or streams only; "
                "expected one graph for any number"
            )
    return StreamProgram(program, state)


def _description(model: LanguageModelShell) -> str:
    return f"the {model.kind}"


def _named(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state with their paths: layers.0.h."""
    for path, leaf in tree_leaves_with_path(state):
        if isinstance(leaf, Tensor):
            yield ".".join(str(getattr(key, "name", getattr(key, "idx", key))) for key in path), leaf
