"""Models prepared to run one step at a time: compiled steps, CUDA graphs, and the choice between them."""

import math
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from recurra.checks import require, require_at_least, require_literal, sentence
from recurra.decoding._program import FlatCall, StateForm, StepProgram, form_of, have_forms, lower_step
from recurra.decoding._prompts import PromptReader
from recurra.decoding._windows import Rows, filled_up, first_rows
from recurra.decoding.linear import MOST_VECTORS, DecodingLinear
from recurra.decoding.memory import StepNotCompiled
from recurra.decoding.packing import pack_linear_layers
from recurra.layers.quantization import dequantized
from recurra.mixers.base import Mixer
from recurra.models.shell import LanguageModelShell, acts_on_calls
from recurra.ops._toolkit.backends import NUMBA_IS_MISSING
from recurra.ops._toolkit.graphs import WARM_UPS, Capture, CudaCapture, Graph
from recurra.state import Ragged, join, n_bytes, n_streams, select, tensors

# A step of a small recurrent model is about a hundred short operations, and Python takes longer between them than they
# do. So the model's own forward runs once and its operations are recorded, as instructions of one Numba function or as
# a CUDA graph; later steps run that list. The recording is compared with the model before it is used.

_MOST_ROWS = 4 * MOST_VECTORS
"""Rows of the largest batch that runs recorded steps, in pieces; above it torch's products over all rows are faster."""

_EXACT = 8
"""Rows up to which each batch has a recording of its own."""

_SIZES = (*range(1, _EXACT + 1), 12, 16, 24, 32, 48, MOST_VECTORS)

_MOST_BYTES = 2**30
"""Limit on the state of a recorded batch of more than `_EXACT` rows, without windows that grow. A recording holds
several copies of it, and rows with large states gain less from reading the weights together."""

_CHECKED_STEPS = 3
"""Steps of one row that are compared with the model. Larger batches run the same instructions: one step is enough."""


class StateShapeChanges(ValueError):
    """A model's steps cannot be recorded."""


class OtherNumbers(StateShapeChanges):
    """The results of a recorded step differ from the model's."""


class _CapturedProgram:
    """A step as a CUDA graph, from tensors in memory of its own to tensors that the next step overwrites.

    A state that was handed out must not change, so a call copies its inputs in and its results out, at once each.
    """

    def __init__(self, step: nn.Module, inputs: Sequence[Tensor], capture: Capture, lock: threading.Lock) -> None:
        self._step, self._lock, self._forms = step, lock, [form_of(tensor) for tensor in inputs]
        self._graph = Graph(*tree_flatten(list(inputs)), capture.device)
        with lock:
            self._graph.fill(inputs)
            for _ in range(WARM_UPS):  # the first ones may wait for the device while they compile
                _, hinders = capture.warm_up(self._run)
            if hinders:
                raise StateShapeChanges(hinders)
            self._results, self._replay = capture.capture(self._run)

    def _run(self) -> tuple[Tensor, ...]:
        return self._step(*self._graph.leaves)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Run the step; None for inputs that it does not take."""
        if not have_forms(inputs, self._forms):
            return None
        with self._lock:  # graphs share memory
            self._graph.fill(inputs)
            self._replay()
            results = [torch.empty_like(result) for result in self._results]
            torch._foreach_copy_(results, self._results)
        return results


_Program: TypeAlias = _CapturedProgram | StepProgram


class RecordedStep(nn.Module, ABC):
    """A model in evaluation mode that runs one token per row from a recording, and everything else itself.

    The step of one row is recorded at construction, those of larger batches when they first occur: of 2 to 8, 12, 16,
    24, 32, 48 and 64 rows, more than 8 only if their states have at most 1 GiB in all. A batch between two of these is
    padded with copies of its last row, so a changing number of streams does not need a recording for each size; batches
    of up to `_MOST_ROWS` rows run in pieces. All other inputs go through the model: several tokens per row, the first
    step of a stream, and tokens or states that differ in form from the recorded ones (the model refuses any that do not
    fit it).
    The model's weights must not change. Its attributes (`config`, `head`) are available here too.

    Args:
        model: called as `model(tokens, state) -> (logits, state)`.
        vocab_size: tokens are below it; a few are drawn to record the step and to check it.

    Raises:
        StateShapeChanges: a step cannot be recorded, because it depends on numbers in the state that are not tensors (a
            position that counts up) or because the state grows.
    """

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        super().__init__()
        require_at_least(1, vocab_size=vocab_size)
        if model.training:
            got = f"a {type(model).__name__} in training mode"
            raise ValueError(sentence("model", got, "one in evaluation mode", "call model.eval() first"))
        self.model, self.vocab_size = model, vocab_size
        self._like, program = self._made_for(1)
        self._states = StateForm(self._like)
        room = _MOST_BYTES // max(1, n_bytes(self._like))
        self.sizes = [size for size in _SIZES if size <= max(_EXACT, room)]
        """The numbers of rows that are recorded."""
        self._programs: dict[int, _Program | None] = {1: program}
        self._recording = threading.Lock()
        self.eval()

    def forward(self, tokens: Int[Tensor, "B L"], state: Any = None) -> tuple[Float[Tensor, "B L V"], Any]:
        """Return the logits after every token, continuing from `state`; None is the start of a stream."""
        results = None
        if state is not None and tokens.ndim == 2 and tokens.shape[1] == 1 and not torch.is_grad_enabled():
            flat = self._states.flatten(state)
            results = None if flat is None else self._run([tokens, *flat])
        if results is None:
            return self.model(tokens, state)
        return results[0], self._states.unflatten(results[1:])

    def _run(self, inputs: list[Any]) -> list[Any] | None:
        """Run recorded steps for tokens and the tensors of a state; None for what they do not take."""
        rows = len(inputs[0])
        if rows <= _EXACT:
            program = self.program(rows)
            return None if program is None else program.run(inputs)
        if rows > _MOST_ROWS or not all(map(_are_rows, inputs, repeat(rows))):
            return None
        done = []
        most = self.sizes[-1]
        for start in range(0, rows, most):
            results = self._run_filled_up([select(part, slice(start, start + most)) for part in inputs])
            if results is None:
                return None
            done.append(results)
        return done[0] if len(done) == 1 else [join(parts) for parts in zip(*done)]

    def _run_filled_up(self, inputs: Sequence[Any]) -> list[Any] | None:
        rows = len(inputs[0])
        size = next(size for size in self.sizes if size >= rows)
        program = self.program(size)
        if program is None:
            return None
        if size == rows:
            return program.run(inputs)
        windows = program.is_window if isinstance(program, StepProgram) else repeat(False)
        full: list[Any] = [filled_up(part, size, is_window) for part, is_window in zip(inputs, windows)]
        results = program.run(full)
        return None if results is None else [first_rows(part, rows) for part in results]

    def program(self, batch: int) -> _Program | None:
        """Return the recorded step of this many rows, recorded now if need be; None if there is none."""
        if batch not in self._programs and batch in self.sizes:
            with self._recording:  # other threads wait for it instead of recording it too
                if batch not in self._programs:
                    try:
                        self._programs[batch] = self._made_for(batch)[1]
                    except (StateShapeChanges, StepNotCompiled):
                        self._programs[batch] = None
        return self._programs.get(batch)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def __reduce__(self) -> tuple:
        """A copy makes its own recordings: they belong to the tensors of this one."""
        return type(self), (self.model, self.vocab_size)

    def _made_for(self, batch: int) -> tuple[Any, _Program]:
        """Record a step of this many rows and check it; give a state of it, and the program."""
        device = next(iter((*self.model.parameters(), *self.model.buffers()))).device
        generator = torch.Generator().manual_seed(0)
        size = (2 + (_CHECKED_STEPS if batch == 1 else 1), batch, 1)
        tokens = torch.randint(self.vocab_size, size, device="cpu", generator=generator).to(device)
        # in the types of the model: a caller's autocast must not stay in what later calls run
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            _, like = self.model(tokens[0])
            if batch == 1 and self._outline(like) != self._outline(self.model(tokens[1], like)[1]):
                raise StateShapeChanges(
                    "the model's steps cannot be recorded: from one to the next, more of its state changes than the "
                    "values of its tensors (a position that counts up, or a window that grows)"
                )
            program = self._record(tokens[1], like)
            self._check(program, tokens[1:], like)
        return like, program

    @abstractmethod
    def _record(self, tokens: Tensor, like: Any) -> _Program:
        """Record the step that reads `tokens` from a state like this."""

    def _outline(self, state: Any) -> Any:
        """Put what must not change of each tensor of a state in its place: its shape and type."""
        if isinstance(state, Tensor):
            return tuple(state.shape), state.dtype
        return [self._outline(part) for part in state] if isinstance(state, (tuple, list)) else state

    def _agrees(self, results: Sequence[Tensor], step: nn.Module, inputs: Sequence[Tensor]) -> bool:
        """Whether a program's results equal those of the model's `step` for the same flat inputs."""
        return all(map(torch.equal, results, step(*inputs)))

    def _check(self, program: _Program, tokens: Tensor, like: Any) -> None:
        step, state = FlatCall(self.model, StateForm(like)), list(tensors(like))
        for row in tokens:
            results = program.run([row, *state])
            if results is None or not self._agrees(results, step, [row, *state]):
                name = type(self.model).__name__
                raise OtherNumbers(f"a recorded step of {name} gives other numbers than the model")
            state = results[1:]


def _are_rows(part: Rows, rows: int) -> bool:
    return n_streams(part) == rows and (isinstance(part, Ragged) or part.layout == torch.strided)


_TOLERANCE = 1e-5
"""How far a tensor of the first steps' results may be from the model's, relative to its largest number."""
_TOLERANCE_IF_ROUNDED = {"int16": 1e-3, "bfloat16": 0.02, "int8": 0.2, "int4": 0.2}
"""The same for the difference's length over the tensor's, where inputs of products are rounded: one between two codes
can fall either way, and each layer passes on what that moved. An operation that is wrong moves all of it."""
_ROUNDING = 1e-6
"""Relative size of random changes to the linear layers' inputs, about that of another order of summation. Deep models
amplify them: with 48 layers of random weights, logits move by 5e-5, or by 0.3 if inputs are rounded to int8. So results
beyond the tolerance also pass if they differ from the model's by at most three times what such changes move the model's
own, and by at most the limits below. Results of all zeros would differ by 1."""
_FARTHEST, _FARTHEST_IF_ROUNDED = 0.01, 0.99


class CompiledStep(RecordedStep):
    """A model whose recorded steps are instructions of one compiled function; float32, on the CPU.

    If a language model's recurrences have instructions for it, prompts of one stream of up to 15 tokens are also
    compiled and read each weight once. Their results equal those of single steps, bit for bit. Each length is recorded
    when it first occurs.

    Sums and elementwise functions round differently from torch's. Results differ from the model's by about 2e-6 of the
    largest number for a model of 12 layers, as much as both differ from float64. With "int8" and "int4" they differ by
    some hundredths and with "bfloat16" by some thousandths, because inputs between two codes may round either way. A
    row's results do not depend on its batch. Results are new tensors, and no input is changed. A call made while
    another thread is inside one of the same batch size goes through the model, because there is one workspace per size.
    So does a call with a token outside the vocabulary, which makes the model raise its own error.

    Args:
        model: called as `model(tokens, state) -> (logits, state)`; fastest if its linear layers are packed for
            decoding.
        vocab_size: tokens are below it; a few are drawn to record the step and to check it.

    Raises:
        StateShapeChanges: a step cannot be recorded (see `RecordedStep`), or the compiled step gives different numbers.
        StepNotCompiled: an operation has no instruction.
        ValueError: the model is in training mode, or has a hook or a replaced `forward`, which prompts would leave out.
    """

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        if acts_on_calls(model):  # which prompts read by `hidden` would leave out
            got = f"a {type(model).__name__} with a hook or another forward"
            raise ValueError(sentence("model", got, "one without", "remove it"))
        super().__init__(model, vocab_size)
        self.prompts: PromptReader | None = None
        """Reads prompts of one stream by compiled programs; None if the model is no language model."""
        if isinstance(model, LanguageModelShell):
            self.prompts = PromptReader(model, self._like, vocab_size, self._agrees)

    def forward(self, tokens: Int[Tensor, "B L"], state: Any = None) -> tuple[Float[Tensor, "B L V"], Any]:
        """Return the logits after every token, continuing from `state`; None is the start of a stream."""
        read = None if self.prompts is None else self.prompts.read(tokens, state)
        if self.prompts is None or read is None:
            return super().forward(tokens, state)
        return self.prompts.model.head(read[0]), read[1]

    @property
    def hidden(self) -> Callable[..., tuple[Tensor, Any]]:
        """The model's `hidden`, which reads short prompts as `forward` does."""
        if self.prompts is None:
            raise AttributeError("hidden")  # so that it is looked for in the model
        return self.prompts.hidden

    def _record(self, tokens: Tensor, like: Any) -> StepProgram:
        return StepProgram(lower_step(FlatCall(self.model, StateForm(like)).eval(), [tokens, *tensors(like)]))

    def _outline(self, state: Any) -> Any:
        """Leave out the lengths, which may grow in attention layers; programs refuse the others."""
        if isinstance(state, Tensor):
            return state.dtype, len(state), *state.shape[2:]
        return super()._outline(state)

    def _agrees(self, results: Sequence[Tensor], step: nn.Module, inputs: Sequence[Tensor]) -> bool:
        right, rounded = step(*inputs), self._rounded_inputs()
        most = max((_TOLERANCE_IF_ROUNDED[number] for number in rounded), default=_TOLERANCE)
        by_length = bool(rounded)
        distances = [_distance(*pair, by_length) for pair in zip(results, right)]
        far = [n for n, distance in enumerate(distances) if not distance <= most]
        if not far:
            return True
        spread = dict.fromkeys(far, 0.0)
        for seed in range(3):
            with _Nudged(seed):
                moved = step(*inputs)
            spread = {n: max(most, _distance(moved[n], right[n], by_length)) for n, most in spread.items()}
        farthest = _FARTHEST_IF_ROUNDED if rounded else _FARTHEST
        return all(distances[n] <= min(3 * most, farthest) for n, most in spread.items())

    def _rounded_inputs(self) -> set[str]:
        parts = list(self.model.modules())
        specs = [spec for part in parts if isinstance(part, Mixer) for spec in part.state_layout]
        states = {str(spec.codes).removeprefix("torch.") for spec in specs if spec.codes is not None}
        return states | {part.dtype for part in parts if isinstance(part, DecodingLinear)} - {"float32"}


def _distance(mine: Tensor, right: Tensor, by_length: bool) -> float:
    """Return how far results are from the model's: by the length of the difference, or else by its largest number."""
    if mine.dtype in (torch.int8, torch.int16):
        n = mine.shape[-1] - 4 // mine.dtype.itemsize
        mine, right = dequantized(mine, n), dequantized(right, n)
    if mine.shape != right.shape:
        return math.inf
    if not mine.numel():
        return 0.0
    order = 2 if by_length else math.inf
    difference, length = (torch.linalg.vector_norm(x.abs().double(), order) for x in (mine - right, right))
    return float(difference / length) if difference else 0.0


class _Nudge:
    """Perturbs the inputs of linear layers by about a rounding error."""

    _generator: torch.Generator

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(target) == "recurra.decoding_linear.default":
            x, *weights = args
            noise = torch.randn(x.shape, generator=self._generator, dtype=x.dtype, device=x.device)
            args = x * (1 + _ROUNDING * noise), *weights
        return target(*args, **(kwargs or {}))


class _Nudged(_Nudge, TorchDispatchMode):
    """The mode; it inherits its method for the reason given at `_Lowering`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)


class CapturedStep(RecordedStep):
    """A model on a GPU whose recorded steps are CUDA graphs in one memory pool.

    Results are new tensors with the model's numbers, bit for bit, and no input is changed. All calls must be on one
    CUDA stream.

    Args:
        model, vocab_size: as for `RecordedStep`.
        capture: what captures; None for CUDA's graphs.

    Raises:
        StateShapeChanges: as for `RecordedStep`, or a step waits for the device or cannot be captured.
    """

    def __init__(self, model: nn.Module, vocab_size: int, capture: Capture | None = None) -> None:
        self._capture = capture or CudaCapture(next(model.parameters()).device)  # a step is recorded at construction
        self._lock = threading.Lock()
        super().__init__(model, vocab_size)

    def _made_for(self, batch: int) -> tuple[Any, _Program]:
        try:
            return super()._made_for(batch)
        except StateShapeChanges as error:
            if batch > 1:  # `prepare` says so of the first
                warnings.warn(f"steps of {batch} streams run without CUDA graphs: {error}", stacklevel=5)
            raise

    def _record(self, tokens: Tensor, like: Any) -> _CapturedProgram:
        step, inputs = FlatCall(self.model, StateForm(like)).eval(), [tokens, *tensors(like)]
        try:
            return _CapturedProgram(step, inputs, self._capture, self._lock)
        except RuntimeError as error:
            raise StateShapeChanges(f"a step cannot be captured ({str(error).splitlines()[0]})") from error


def prepare(
    model: nn.Module,
    dtype: str = "float32",
    *,
    kv_cache_dtype: str = "float32",
    state_dtype: str = "float32",
    in_place: bool = False,
    graphs: Literal["auto", "off", "on"] = "off",
) -> nn.Module:
    """Copy `model` with its linear layers packed for decoding, and compile its single steps if possible.

    The result is called like the model, under torch.no_grad(), returns states of the same form, and runs one stream or
    several at once, also at different positions. It does not follow later changes of the model's weights. A model with
    a state that counts positions (segment models) or with attention other than rotary or latent attention keeps the
    Python around its operations. The first compilation on a machine takes about four seconds.

    On a CUDA device, and only with `graphs`, the result is the model itself, in its own types, with each step of one
    token per stream replayed as one CUDA graph for each number of streams. A model whose state counts positions or
    grows runs as it is.

    Args:
        model: a language model with `config.vocab_size`, in float32 or bfloat16 on the CPU; with `graphs`, of any dtype
            on a GPU.
        dtype: how weights are stored: "float32", "bfloat16", "int8" or "int4"; on a GPU they stay as they are.
        kv_cache_dtype: how the states of rotary attention hold keys and values: "float32", or "int8" with one scale for
            each step and head of keys and of values. The states are then other ones than the model's.
        state_dtype: how matrices of each head in the states of other mixers are held between calls: "float32", or
            "int16" with a scale for each matrix, for models whose steps compile: with Mamba-2, delta rules,
            RWKV-7, GLA, HGRN2, mLSTM and linear attention.
        in_place: pack the model itself, which then is the result's, and free each layer's weights in turn: for a model
            that barely fits into memory.
        graphs: "auto": use CUDA graphs on a CUDA device; if that is impossible, return the model and warn why. "on":
            raise instead. Off by default: not yet tested on a GPU.

    Raises:
        ValueError: there is no such dtype, or the model is of another dtype on the CPU, has no such config, or has no
            keys and values for "int8" or matrices for "int16"; or `graphs` is "on" and there can be none.
        RuntimeError: Numba is missing.
    """
    require_literal(Literal["auto", "off", "on"], graphs=graphs)
    vocab_size: Any = getattr(getattr(model, "config", None), "vocab_size", None)
    require(isinstance(vocab_size, int), "model.config.vocab_size", vocab_size, "the number of tokens")
    states = {"kv_cache_dtype": kv_cache_dtype, "state_dtype": state_dtype}
    if graphs != "off" and next(model.parameters()).device.type == "cuda":
        for name, given in {"dtype": dtype, **states}.items():
            require(given == "float32", name, given, "float32, the default, on a card: its weights stay as they are")
        return _captured(model, vocab_size, graphs)
    if graphs == "on":
        raise ValueError(sentence("graphs", "on, and the model is not on a CUDA device", "auto or off"))
    if NUMBA_IS_MISSING:
        hint = "weights=None, or --weights model of `recurra serve`, decodes with the model itself"
        raise RuntimeError(f"{NUMBA_IS_MISSING}; expected it for packed weights: {hint}")
    packed = pack_linear_layers(model, dtype, **states, in_place=in_place)
    try:
        return CompiledStep(packed, vocab_size)
    except (StepNotCompiled, StateShapeChanges) as error:
        if isinstance(error, OtherNumbers):
            warnings.warn(f"decoding without compiled steps, slower: {error}", stacklevel=2)
        if state_dtype != "float32":  # a conversion at every step would cost more than it saves
            raise ValueError(sentence("state_dtype", state_dtype, "float32 for this model", str(error))) from error
    return packed


def _captured(model: nn.Module, vocab_size: int, graphs: str, capture: Capture | None = None) -> nn.Module:
    try:
        return CapturedStep(model, vocab_size, capture)
    except StateShapeChanges as error:
        if graphs == "on":
            raise ValueError(sentence("graphs", f"on, and {error}", "auto or off for this model")) from error
        warnings.warn(f"decoding without CUDA graphs: {error}", stacklevel=3)
        return model
