"""Language models as torch.export programs: which can be exported, and the operators of their graphs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves_with_path

import recurra.ops.gate_loop._heads
import recurra.ops.gate_loop.fused
import recurra.ops.selective_scan  # noqa: F401
from recurra.checks import kind_of, sentence
from recurra.models.shell import LanguageModelShell, mixers_with_transition
from recurra.state import map_tensors, tensors

_WANTED = "one graph for any number of tokens, whose state has one shape at every step"


def require_exportable(model: nn.Module) -> LanguageModelShell:
    """Return the model, or refuse one that has no graph for any number of tokens."""
    if not isinstance(model, LanguageModelShell):
        raise TypeError(sentence("model", kind_of(model), "a language model"))
    if reason := model.why_not_exportable():
        raise ValueError(f"the {type(model).__name__} cannot be exported: {reason}; expected {_WANTED}")
    types = {parameter.dtype for parameter in model.parameters()}
    if types != {torch.float32}:
        names = ", ".join(sorted(str(dtype) for dtype in types))
        raise ValueError(f"the model's parameters are of type {names}; expected float32: convert it with model.float()")
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise ValueError(f"the model is on {device}; expected it on the CPU: use model.cpu()")
    return model


# --- recurra::complex_scan: a complex linear_scan in planes (B, L, D) and (B, D), for graphs of real numbers ---


_library = torch.library.Library("recurra", "FRAGMENT")
_library.define(
    "complex_scan(Tensor a_re, Tensor a_im, Tensor b_re, Tensor b_im, Tensor h0_re, Tensor h0_im) -> (Tensor, Tensor)"
)


def _complex_scan(*planes: Tensor) -> tuple[Tensor, Tensor]:
    a, b, h0 = map(torch.complex, planes[::2], planes[1::2])
    h = torch.ops.recurra.linear_scan(a, b, h0, False)
    return h.real.contiguous(), h.imag.contiguous()


_library.impl("complex_scan", _complex_scan, "CPU")


@torch.library.register_fake("recurra::complex_scan")
def _complex_scan_fake(*planes: Tensor) -> tuple[Tensor, Tensor]:
    return planes[2].new_empty(planes[2].shape), planes[2].new_empty(planes[2].shape)


# --- the recurrences of a graph for one token: at one step a scan is a product and a sum ---


def _one_step_complex_scan(*planes: Tensor) -> tuple[Tensor, Tensor]:
    a_re, a_im, b_re, b_im, h0_re, h0_im = planes
    re, im = h0_re.unsqueeze(1), h0_im.unsqueeze(1)
    return a_re * re - a_im * im + b_re, a_re * im + a_im * re + b_im


def _gate_loop_fused(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, a_re, a_im, x0_re, x0_im, *_ = operands
    if a_im is None or x0_im is None:
        re = a_re * x0_re.unsqueeze(1) + k * v
        return q * re, re, re.new_empty(0)
    re, im = x0_re.unsqueeze(1), x0_im.unsqueeze(1)
    re, im = a_re * re - a_im * im + k * v, a_re * im + a_im * re
    return q * re, re, im


AT_ONE_STEP: dict[Any, Callable[..., Any]] = {
    torch.ops.recurra.linear_scan.default: lambda a, b, h0, *_: a * h0.unsqueeze(1) + b,
    torch.ops.recurra.complex_scan.default: _one_step_complex_scan,
    torch.ops.recurra.gate_loop_fused.default: _gate_loop_fused,
}
"""Decompositions for `ExportedProgram.run_decompositions`."""


# --- language models as torch.export programs: the state comes in and goes out; nothing is kept between calls ---


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

    Its state tensors are those of `state`; complex ones are real tensors that end in 2. A stream starts from zeros.
    """

    program: ExportedProgram
    state: tuple[StateTensor, ...]


def prefill_program(model: LanguageModelShell, *, batch: int | None = 1) -> StreamProgram:
    """Trace a model for any number of tokens from 2 on; `step_program` traces it for one.

    The program calls the kernels of this package, so `import recurra` before `torch.export.load`.

    Args:
        model: a language model on the CPU, in float32.
        batch: number of streams; None for any number from 2 on.
    """
    return _trace(model, batch, None)


def step_program(model: LanguageModelShell, *, batch: int | None = 1) -> StreamProgram:
    """Trace a model for one token of every stream, tokens (B, 1); otherwise as `prefill_program`."""
    return _trace(model, batch, 1)


def state_tensors(model: LanguageModelShell) -> tuple[StateTensor, ...]:
    """List the tensors of a model's state."""
    return tuple(
        StateTensor(name, tuple(x.shape[1:]) + ((2,) if x.is_complex() else ()), x.is_complex())
        for name, x in _named(model.initial_state(1))
    )


def zero_state(state: tuple[StateTensor, ...], batch: int) -> list[Tensor]:
    """Return the state of `batch` streams at their start."""
    return [torch.zeros(batch, *tensor.shape) for tensor in state]


class _FlatModel(nn.Module):
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


def _trace(
    model: LanguageModelShell, batch: int | None, length: int | None, flat: type[_FlatModel] = _FlatModel
) -> StreamProgram:
    """Trace a model, as `flat` calls it, for any or one number of streams and tokens."""
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
        raise ValueError(f"the {model.kind} cannot be traced for any number of tokens: {error}") from error
    finally:
        model.train(was_training)
    for bounds in program.range_constraints.values():
        if bounds.lower > _BATCH or bounds.upper < _ENDLESS:
            raise ValueError(
                f"the {model.kind} has a graph for {bounds.lower} to {bounds.upper} tokens or streams only; "
                "expected one graph for any number"
            )
    return StreamProgram(program, state)


def _named(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state with their paths: layers.0.h."""
    for path, leaf in tree_leaves_with_path(state):
        if isinstance(leaf, Tensor):
            yield ".".join(str(getattr(key, "name", getattr(key, "idx", key))) for key in path), leaf


# --- a language model's step with its transitions among the outputs, for programs that show them ---


class GateLayer(NamedTuple):
    """A layer whose transition a gated program returns.

    layer: its number, from 0. channels: how many numbers it has for each of |a| and the phase.
    """

    layer: int
    channels: int


def gated_step_program(model: LanguageModelShell) -> tuple[StreamProgram, tuple[GateLayer, ...]]:
    """Trace a model for one token of one stream, with its transitions among the outputs."""
    return _trace(model, 1, 1, GatedModel), gate_layers(model)


@torch.no_grad()
def gate_layers(model: LanguageModelShell) -> tuple[GateLayer, ...]:
    """List the layers whose transitions a single step shows."""
    require_exportable(model)
    gated = GatedModel(model)
    _, gates = gated.run(torch.zeros(1, 1, dtype=torch.int64), *zero_state(state_tensors(model), 1))
    return tuple(GateLayer(layer, magnitude.shape[-1]) for layer, (magnitude, _) in zip(gated.mixers, gates))


class GatedModel(_FlatModel):
    """A language model whose state is a list of real tensors, and which returns its transitions after the logits."""

    def __init__(self, model: LanguageModelShell) -> None:
        super().__init__(model)
        self.mixers = mixers_with_transition(model, step_by_step=True) if hasattr(model, "blocks") else {}

    def forward(self, tokens: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, |a| and the phases of all layers, and the next state."""
        (logits, *last), gates = self.run(tokens, *state)
        none = logits[:, -1, :0]
        magnitudes, phases = (torch.cat([none, *(pair[which][:, -1] for pair in gates)], -1) for which in (0, 1))
        return logits, magnitudes, phases, *last

    def run(self, tokens: Tensor, *state: Tensor) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, Tensor]]]:
        """Return what the model returns, and the transitions of its layers."""
        gates: list[tuple[Tensor, Tensor]] = []

        def keep(mixer: nn.Module, arguments: tuple[Any, ...]) -> None:
            magnitude, phase = mixer.transition(arguments[0])  # type: ignore[operator]
            gates.append((magnitude.float(), phase.float()))

        with ExitStack() as afterwards:
            for mixer in self.mixers.values():
                afterwards.callback(mixer.register_forward_pre_hook(keep).remove)
            return super().forward(tokens, *state), gates
