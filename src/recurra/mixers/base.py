"""The base class of mixers, which checks input and state and runs padded and packed sequences; and their registry."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from recurra.checks import kind_of, require_numbers, require_tensor, require_whole_number, sentence
from recurra.layers.feed_forward import BlockDiagonalLinear
from recurra.lengths import mask_fill, run_lengths, run_resets
from recurra.ops._causality import keep_apart, nonfinite_steps, up_to_last
from recurra.ops._operator import HALF
from recurra.registry import Registry
from recurra.state import Ragged, batch, require_streams, split

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_MEND = "pass the state that this module returned for these streams (recurra.state.select takes streams out)"


class Dim(NamedTuple):
    """A state dimension that counts steps: of any size up to `most`, or unbounded if `most` is None.

    Dimensions of the same name have the same size.
    """

    name: str
    most: int | None


class StateSpec(NamedTuple):
    """The shape of a state tensor without the batch dimension; real or complex, and float32 or better.

    Copies for decoding may keep it in whole numbers.
    """

    shape: tuple[int | Dim, ...]
    is_complex: bool = False
    codes: torch.dtype | None = None
    """int8 or int16 if copies for decoding keep it as `recurra.layers.quantization` does."""

    def dtype(self, real: torch.dtype) -> torch.dtype:
        """Return the dtype of the tensor in a layer that computes in `real`."""
        return self.codes or (_COMPLEX[real] if self.is_complex else real)


Recurrence: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A linear recurrence over given steps, from the state before them to (y, the state after them)."""


class _Across(Protocol):
    """How to run a mixer's call that computes only a part of a sequence."""

    def run(self, call: Callable[[Any], tuple[Tensor, Any]], state: Any) -> tuple[Tensor, Any]:
        """Run any mixer: `call` takes the state that enters its part."""

    def recur(self, run: Recurrence, a: Any, h0: Tensor) -> tuple[Tensor, Tensor]:
        """Run a linear recurrence, as `Mixer.recur`."""


class Mixer(nn.Module, ABC):
    """Base class of mixers: a subclass declares its state and defines `mix`, with no code for padding or packing.

        class Average(Mixer):
            def __init__(self, d_model: int) -> None:
                super().__init__(d_model, AverageState, h=StateSpec((d_model,)))

            def mix(self, x, state, mask):
                ...

    The base class checks inputs, starts streams, and runs padded and packed sequences. The layout passed to `__init__`
    describes the state, so another module's state is refused before it reaches a kernel. States are float32 or
    complex64 for any precision of the inputs, and float64 or complex128 in a float64 layer.

    Args:
        d_model: channels of x and y.
        state_class: the NamedTuple that is the state.
        specs: the shapes of its tensors, by field name.
    """

    skips_padding: ClassVar[bool] = False
    """Whether `mix` takes a mask and leaves the state unchanged where it is False (transitions of 1, inputs of 0). If
    not, it never sees padding: sequences of different lengths run in pieces."""
    masks_products: ClassVar[bool] = False
    """Whether `mix` multiplies by the zeros of a mask, which turns an infinity or NaN of a later step into NaN. A call
    is then cut before a non-finite step of x, and the backward pass skips steps with a non-finite gradient of y: the
    gradients of x up to there, of the state and of all parameters are NaN. This is checked neither on devices other
    than the CPU nor in traces or under torch.func: an infinity then makes earlier outputs of its window or segment
    NaN."""
    starts_from_none: ClassVar[bool] = False
    """Whether `mix` accepts None at the start of a stream, because it has a faster path from there."""

    transition_looks_back: ClassVar[bool] = False
    """Whether the mixer's `transition` also depends on earlier steps. It then takes the state: `transition(x, state)`,
    where None starts a stream."""

    is_linear_recurrence: ClassVar[bool] = False
    """Whether the state is only that of one linear recurrence, which `mix` computes through `recur`. Then
    `recurra.train.sequence_parallel.SequenceParallel` can compute all pieces of a sequence at the same time."""
    d_carried: int = 0
    """Channels that the mixer takes after the d_model of x and returns after those of y. In a model they pass from
    block to block, zeros at first. The mixer needs an option `layer`, which a model with several of its name sets to
    their number, from 1."""
    takes_stream: ClassVar[bool] = False
    """Whether x is the residual stream itself, not a norm of it, and the carried channels are the embedded tokens. In
    a model of several layers the mixer then always has a number `layer`."""
    across: "_Across | None" = None
    """Set by sequence parallelism while it calls the mixer."""

    def __init__(self, d_model: int, state_class: type[Any], **specs: StateSpec) -> None:
        super().__init__()
        require_whole_number(1, d_model=d_model)
        self.d_model = self.d_output = d_model
        self.state_layout: Any = state_class(**specs)

    @abstractmethod
    def mix(self, *given: Any, **shared: Any) -> tuple[Tensor, Any]:
        """Mix at least one step along time: `mix(self, x, state, mask)`.

        Args:
            x: (B, L, d_model), zeros at padding.
            state: the state after the previous steps, in the declared layout.
            mask: (B, L), True where a step counts; always None unless the mixer `skips_padding`.
            shared: additional inputs from the caller.

        Returns:
            y (B, L, d_output), with any values at padding, and the next state, which shares no memory with the inputs.
        """

    def forward(
        self,
        x: Float[Tensor, "B L d_model"],
        state: Any = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
        reset: Bool[Tensor, "B L"] | None = None,
        **shared: Any,
    ) -> tuple[Float[Tensor, "B L d_output"], Any]:
        """Mix `x` along time, continuing from `state`.

        Args:
            x: any number of steps: a whole sequence, a chunk, or one token.
            state: the state after the previous steps; None starts a stream.
            mask: True where a step counts; padding changes nothing, and its outputs are zeros.
            cu_seqlens: the offsets of N packed sequences in x (1, T, d_model); the state has batch N.
            reset: True at the first step of each new sequence, which starts from zeros, as if the stream were cut
                there. The next state is that of the last sequence. Cannot be combined with `cu_seqlens`.
            shared: inputs computed once per model and passed to every layer; not with mask, cu_seqlens or reset.

        Raises:
            TypeError: x, mask, reset or cu_seqlens has the wrong type, or the state belongs to another module.
            ValueError: shapes do not fit, mask and cu_seqlens are both given, or the state belongs to another module.
        """
        _check_input(x, self.d_model + self.d_carried)
        if x.is_meta:
            require_numbers("x", x, self._weight())
        state = _of_one_kind(state)
        if mask is None and cu_seqlens is None and reset is None and not isinstance(state, Ragged):
            return self._run(x, state, **shared)
        if shared:
            got = "given for sequences of different lengths"
            raise ValueError(sentence(", ".join(shared), got, "sequences of one length", "omit it"))
        if reset is not None:
            return run_resets(self.forward, x, state, reset, mask=mask, cu_seqlens=cu_seqlens)
        return run_lengths(self._run, x, state, mask=mask, cu_seqlens=cu_seqlens, skips_padding=self.skips_padding)

    def _run(self, x: Tensor, state: Any, mask: Tensor | None = None, **shared: Any) -> tuple[Tensor, Any]:
        real = torch.promote_types(x.dtype, torch.float32)
        if state is not None:
            _check_state(state, self.state_layout, x.shape[0], real, x.device)
        if state is None and not (self.starts_from_none and x.shape[1]):
            state = self._start(x.shape[0], real, x.device)
        if self.across is not None and not self.is_linear_recurrence:
            return self.across.run(lambda entering: self._mix(x, entering, mask, shared), state)
        return self._mix(x, state, mask, shared)

    def recur(self, run: Recurrence, a: Any, h0: Tensor) -> tuple[Tensor, Tensor]:
        """Run the linear recurrence of a mixer that `is_linear_recurrence`.

        `run` is h0 -> (y, last state), `a` its transitions (B, L, ...), for each entry of the state or for all of its
        last dimension, or their planes, and `h0` the state before it.
        """
        return run(h0) if self.across is None else self.across.recur(run, a, h0)

    def _mix(self, x: Tensor, state: Any, mask: Tensor | None, shared: dict[str, Any]) -> tuple[Tensor, Any]:
        if not x.shape[1]:
            y = x[..., :1].expand(*x.shape[:2], self.d_output)  # no step, but still a node of the graph
            return with_zero_gradients(y, self.parameters()), state
        mix = self._mix_apart if self.masks_products and x.is_cpu and x.shape[1] > 1 else self.mix
        y, state = mix(mask_fill(x, mask, 0), state, mask, **shared)
        return mask_fill(y, mask, 0), state

    def _mix_apart(self, x: Tensor, state: Any, mask: Tensor | None, **shared: Any) -> tuple[Tensor, Any]:
        y, last = self.mix(x, state, mask, **shared)
        if nonfinite_steps(y) is not None and (bad := nonfinite_steps(x)) is not None:
            begins = 1 + (bad[:, 1:] & ~bad[:, :-1]).any(0).nonzero().flatten()
            outputs, last = [], state
            masks = [None] * (len(begins) + 1) if mask is None else mask.tensor_split(begins, 1)
            for piece, of_piece in zip(x.tensor_split(begins, 1), masks):
                y, last = self.mix(piece, last, of_piece, **shared)
                outputs.append(y)
            y = torch.cat(outputs, 1)
        if not y.requires_grad:
            return y, last

        def reached(bad: Tensor) -> list[Tensor]:
            before, sequences = up_to_last(bad)[..., None], bad.any(1)
            of_state = (sequences.reshape(-1, *(1,) * (part.dim() - 1)) for part in state)
            return [before, *of_state, *(sequences.any() for _ in self.parameters())]

        return keep_apart(y, reached, x, *state, *self.parameters()), last

    def initial_state(self, batch: int) -> Any:
        """Return the state of `batch` streams at their start: zeros, on the module's device."""
        weight = self._weight()
        return self._start(batch, torch.promote_types(weight.dtype, torch.float32), weight.device)

    def require_state(self, state: Any, batch: int) -> None:
        """Refuse anything but a state of `batch` streams that this module could have returned.

        Raises TypeError or ValueError.
        """
        state = _of_one_kind(state)
        if isinstance(state, Ragged):
            require_streams(self.require_state, state, batch)
            return
        weight = self._weight()
        real = torch.promote_types(weight.dtype, torch.float32)
        _check_state(state, self.state_layout, batch, real, weight.device)

    def _weight(self) -> Tensor:
        # a copy made for decoding may have only buffers, and a mixer of one's own nothing at all
        return next(chain(self.parameters(), self.buffers()), torch.empty(0))

    def transition_parameters(self) -> set[nn.Parameter]:
        """The parameters of the transition a_n, for a separate learning rate and weight decay; none by default."""
        return set()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Mixer":
        """Keep what makes transitions in float32 when the rest becomes float16 or bfloat16.

        Rounded to 8 bits, a decay or frequency is another one: its error grows with every step. Weights of linear
        layers, which make transitions from inputs, are converted.
        """
        of_inputs = [m for m in self.modules() if isinstance(m, (nn.Linear, BlockDiagonalLinear))]
        filters = [m for m in self.modules() if getattr(m, "needs_exact_weights", False)]
        exact = self.transition_parameters() - {weight for layer in of_inputs for weight in layer.parameters()}
        exact.update(weight for layer in filters for weight in layer.parameters())
        kept = {id(part) for weight in exact for part in (weight, weight.grad)}

        def convert(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            if id(tensor) in kept and converted.dtype in HALF and tensor.dtype not in HALF:
                return tensor.to(converted.device)
            return converted

        return super()._apply(convert, recurse)

    def share(self, earlier: Sequence["Mixer"]) -> None:
        """Share parameters with the mixers of its name that a model has before it; none by default."""

    def why_not_exportable(self) -> str:
        """Return why no single graph covers any number of steps; empty if one graph does."""
        return ""

    def _start(self, batch: Any, real: torch.dtype, device: torch.device) -> Any:
        return type(self.state_layout)(
            *(
                torch.zeros(
                    (batch, *(0 if isinstance(size, Dim) else size for size in spec.shape)),
                    dtype=spec.dtype(real),
                    device=device,
                )
                for spec in self.state_layout
            )
        )


def _of_one_kind(state: Any) -> Any:
    """Turn a state with a `Ragged` among its tensors into one, as a compiled step returns it."""
    if isinstance(state, tuple) and not isinstance(state, Ragged) and Ragged in map(type, state):
        return batch(split(state))
    return state


def with_zero_gradients(y: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Return y, which may not depend on these parameters; their gradients are then zeros, and not None.

    DDP waits for a gradient of every parameter, and y is what most losses depend on: a state may be used or not.
    """
    return y + sum(p.flatten()[:0].sum() for p in parameters) if torch.is_grad_enabled() else y


def _check_input(x: Tensor, d_model: int) -> None:
    require_tensor("x", x)
    if x.dim() != 3 or x.shape[-1] != d_model or not x.is_floating_point():
        raise ValueError(sentence("x", kind_of(x), f"real numbers of shape (batch, steps, d_model = {d_model})"))


def _check_state(state: Any, layout: Any, batch: Any, real: torch.dtype, device: torch.device) -> None:
    """Compare a state with its layout. It runs once a call and layer, so the good case is a few comparisons."""
    if type(state) is not type(layout):
        raise TypeError(sentence("state", kind_of(state), f"a {type(layout).__name__}, or None to start", _MEND))
    sizes: dict[str, int] = {}
    for tensor, spec, name in zip(state, layout, layout._fields):
        dtype = spec.dtype(real)
        if (
            isinstance(tensor, Tensor)
            and tensor.dtype is dtype
            and (tensor.shape == (batch, *spec.shape) or _fits(tensor.shape, batch, spec.shape, sizes))
            and tensor.device == device
        ):
            continue
        expected = f"{str(dtype).removeprefix('torch.')} {_describe(batch, spec.shape, sizes)} on {device}"
        raise ValueError(sentence(f"state.{name}", kind_of(tensor), expected, _MEND))


def _fits(shape: torch.Size, batch: Any, expected: tuple[int | Dim, ...], sizes: dict[str, int]) -> bool:
    if len(shape) != len(expected) + 1 or shape[0] != batch:
        return False
    for size, wanted in zip(shape[1:], expected):
        if isinstance(wanted, Dim):
            if size != sizes.setdefault(wanted.name, size) or (wanted.most is not None and size > wanted.most):
                return False
        elif size != wanted:
            return False
    return True


def _describe(batch: Any, expected: tuple[int | Dim, ...], sizes: dict[str, int]) -> str:
    """The shape that is expected, with a range for dimensions that count steps."""
    parts = [str(batch)]
    for size in expected:
        if isinstance(size, Dim):
            parts.append(f"{size.name} >= 0" if size.most is None else f"{size.name} in 0..{size.most}")
        else:
            parts.append(str(size))
    return f"({', '.join(parts)})"


_mixers: Registry[type[Mixer]] = Registry("mixer", "recurra.mixers")
_Class = TypeVar("_Class", bound=type[Mixer])


def register_mixer(name: str) -> Callable[[_Class], _Class]:
    """Register a mixer class under `name`; it is called as `cls(d_model, **options)`.

    Language models, recipes, exports and the contract tests can then use it.
    """
    return _mixers.register(name)  # type: ignore[return-value]


def list_mixers() -> list[str]:
    """List the names of all registered mixers."""
    return list(_mixers)


def create_mixer(name: str, d_model: int, **options: Any) -> Mixer:
    """Create a mixer by name.

    Args:
        name: one of `list_mixers()`.
        d_model: channels of its input and output.
        options: keyword arguments of its class.

    Raises:
        ValueError: the name or an option is unknown; the message lists the valid ones.
    """
    allowed = mixer_options(name)
    unknown = [option for option in options if option not in allowed]
    if unknown:
        fits = f"one of {', '.join(allowed)}" if allowed else "no options"
        raise ValueError(f"mixer {name!r} has no option {', '.join(unknown)}; expected {fits}")
    return _mixers[name](d_model, **options)


def mixer_options(name: str) -> dict[str, Any]:
    """Return the options of a mixer with their defaults."""
    parameters = inspect.signature(_mixers[name]).parameters
    return {option: parameter.default for option, parameter in parameters.items() if option != "d_model"}
