"""An operator is declared once: schema, memory, kernel, FLOPs, and where its derivatives come from.

First gradients come from a kernel. Gradients that are differentiated again, and batches of gradients, come from a
reference in plain torch, and so does everything under torch.func and forward derivatives: kernels read addresses, and
what is transformed has none. A `Differentiable` is neither a `torch.library.custom_op`, with whose `register_autograd`
`torch.func.jvp` silently returns zeros, nor an `autograd.Function` with `setup_context`, for which torch binds the
arguments to a signature at every call.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from recurra.checks import kind_of, require_layout, sentence
from recurra.ops._toolkit.backends import choose_backend
from recurra.ops._toolkit.fork import is_forked_child

_PLAIN = (Tensor, torch.nn.Parameter)
# of torch's older vmap, which is_grads_batched=True uses; a private name, which may go
_is_old_batch = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: False)
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_library = torch.library.Library("recurra", "FRAGMENT")


def transforms_are_active() -> bool:
    """Return whether torch.func or forward derivatives are at work. Under torch.compile it is False."""
    return not torch.compiler.is_compiling() and _transforms()


def _transforms() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def has_numbers(*arguments: Any) -> bool:
    """Return whether all tensors have memory that a kernel may read, and nobody records or counts operators.

    A fake tensor, a tracer's tensor, zeros that torch keeps without memory, a batch, and what a transform of torch.func
    has wrapped have none; the memory of a lazy negative or conjugate has other numbers. Under a dispatch mode, what is
    made of x may be fake though x is not.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return False
    for x in arguments:
        if type(x) in _PLAIN:
            if x.is_meta or x.is_neg() or x.is_conj() or x._is_zerotensor() or _is_wrapped(x) or _is_old_batch(x):
                return False
        elif isinstance(x, Tensor):
            return False
    return True


def needs_gradient(*arguments: Any) -> bool:
    """Return whether autograd records what is computed from these."""
    if torch.is_grad_enabled():
        for x in arguments:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def is_recorded() -> bool:
    """Return whether a dispatch mode takes down what an eager call without gradients computes, as for decoding."""
    is_eager = not torch.compiler.is_compiling() and not torch.is_grad_enabled()
    return is_eager and torch._C._len_torch_dispatch_stack() > 0


_nothing = nullcontext()


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context in which autocast rounds nothing on x's device; one that does nothing if autocast is off.

    A trace holds the context in any case, because autocast may be on when the trace runs.
    """
    device = x.device.type
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return _nothing


def numba_kernels_take(x: Tensor, *dtypes: torch.dtype) -> bool:
    """Return whether Numba's eager kernels take x: on a CPU, of one of `dtypes` (float32), neither empty, nor traced
    nor transformed."""
    return (
        x.dtype in (dtypes or (torch.float32,))
        and x.is_cpu
        and bool(x.numel())
        and has_numbers(x)
        and not transforms_are_active()
        and choose_backend("auto", x.device) == "numba"
    )


def is_batch(*gradients: Tensor | None) -> bool:
    """Return whether the gradients of a backward pass are a batch, which has no address.

    It comes from torch.func or, with `is_grads_batched=True`, from torch's older vmap.
    """
    if torch.compiler.is_compiling():
        return False
    return _transforms() or any(g is not None and _is_old_batch(g) for g in gradients)


def is_any_length(n_steps: Any) -> bool:
    """Return whether a trace may serve any number of steps from 2 on; what it does then must not depend on theirs.

    Dynamo does not say which sizes are symbols, so that all of its traces count; torch.export's do.
    """
    return n_steps != 1 and (isinstance(n_steps, torch.SymInt) or torch.compiler.is_dynamo_compiling())


class Operator:
    """recurra::<name>, a torch operator around a kernel, called with its arguments in the order of its schema.

    Eager calls go straight to the kernel; through torch's dispatcher go only those that somebody watches: a tracer, a
    compiler, a dispatch mode such as torch's FLOP counter.

    Args:
        schema: in torch's notation, from the name on.
        check: refuses tensors whose addresses the kernel cannot take; gets all arguments.
        allocate: makes memory for the results, of shapes and types alone: it serves tracers with fake tensors too.
        run: fills the results, which come first, before the arguments.
        flops: counts operations from the arguments, with shapes in the place of tensors.
        devices: dispatch keys for which the kernel exists.

    `record`, which may be set later, computes the same with gradients. A program of torch.export has the bare operator
    in it and may run with gradients on; without `record` it refuses to.
    """

    record: Callable[..., Any] | None = None

    def __init__(
        self,
        schema: str,
        *,
        check: Callable[..., None],
        allocate: Callable[..., Any],
        run: Callable[..., None],
        flops: Callable[..., int] | None = None,
        devices: Sequence[str] = ("CPU",),
    ) -> None:
        self.name = schema.partition("(")[0]
        self._check, self._allocate, self._run = check, allocate, run
        _library.define(schema)
        self.bare = getattr(torch.ops.recurra, self.name).default
        self._defaults = {argument.name: argument.default_value for argument in self.bare._schema.arguments}
        for device in devices:
            _library.impl(self.name, lambda *given, **named: self._checked(*self._bound(given, named)), device)
        _library.impl(self.name, self._below_or_recorded, "Autograd")
        torch.library.register_fake(f"recurra::{self.name}", self._fake, lib=_library)
        if flops is not None:
            _waiting.append((self.bare.overloadpacket, lambda *shapes, **named: flops(*self._bound(shapes, named))))
            _hand_over_formulas()

    def __call__(self, *arguments: Any) -> Any:
        """Compute the results, eagerly or through the dispatcher."""
        if has_numbers(*arguments) and not needs_gradient(*arguments) and not _transforms():
            return self._checked(*arguments)
        _hand_over_formulas()
        return self.bare(*arguments)

    def behind_door(self, *arguments: Any) -> Any:
        """The same for the forward pass of a `Differentiable`, behind a public function that has checked arguments."""
        if has_numbers(*arguments):
            return self._compute(*arguments)
        _hand_over_formulas()
        return self.bare(*arguments)

    def _checked(self, *arguments: Any) -> Any:
        self._check(*arguments)
        return self._compute(*arguments)

    def _compute(self, *arguments: Any) -> Any:
        results = self._allocate(*arguments)
        self._run(results, *arguments)
        return results

    def _bound(self, arguments: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        """Arguments in the order of the schema; the dispatcher leaves out those that equal their defaults."""
        given = dict(zip(self._defaults, arguments)) | named
        return [given.get(name, default) for name, default in self._defaults.items()]

    def _fake(self, *arguments: Any, **named: Any) -> Any:
        """Among several devices the dispatcher chooses "meta", and would return memory that nobody has filled."""
        bound = self._bound(arguments, named)
        tensors = [(name, x) for name, x in zip(self._defaults, bound) if isinstance(x, Tensor)]
        ((device, _),) = Counter(x.device for _, x in tensors).most_common(1)
        for name, x in tensors:
            if x.device != device:
                raise ValueError(sentence(name, kind_of(x), f"a tensor on {device}"))
        return self._allocate(*bound)

    def _below_or_recorded(self, *arguments: Any) -> Any:
        """What the bare operator does when it may be asked for a derivative, rather than return zeros."""
        backwards, forwards = needs_gradient(*arguments), False
        if forward_ad._current_level >= 0 and forward_ad._is_fwd_grad_enabled():
            tensors = (x for x in arguments if isinstance(x, Tensor))
            forwards = any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
        if backwards and not forwards and self.record is not None:
            bound = self._bound(arguments, {})
            self._check(*bound)
            return self.record(*bound)
        if backwards or forwards:
            raise NotImplementedError(
                f"recurra::{self.name} has no derivative of this kind in a traced program: differentiate the model "
                'itself, outside torch.compile and torch.export, or use backend="reference"'
            )
        with torch._C._AutoDispatchBelowAutograd():
            return self.bare(*arguments)


_COUNTER = "torch.utils.flop_counter"
_waiting: list[tuple[Any, Callable[..., int]]] = []
_known: dict[Any, Callable[..., int]] = {}


def _hand_over_formulas() -> None:
    """Give torch's FLOP counter the formulas once it is loaded (that loads Triton, 0.4 s), and counters made before."""
    if torch.compiler.is_compiling() or _COUNTER not in sys.modules:
        return
    counter: Any = sys.modules[_COUNTER]
    while _waiting:
        operator, formula = _waiting.pop(0)
        counter.register_flop_formula(operator)(formula)
        _known[operator] = counter.flop_registry[operator]
    for mode in _get_current_dispatch_mode_stack():
        if (registry := getattr(getattr(mode, "counter", None), "flop_registry", None)) is not None:
            registry.update(_known)


class Differentiable:
    """A function of tensors with a kernel for each pass.

    Args:
        forward: from (keep, *inputs, *options) to a tuple of outputs and one of tensors to save, which is used if
            `keep`: the inputs first, unless `again` is given.
        backward: from (gradients, saved, needs, *options) to the inputs' gradients. A gradient is None where an output
            was not used, `needs` says for each input whether its gradient is wanted.
        n_inputs: the number of inputs, tensors or None; what follows are options.
        reference: the outputs from (*inputs, *options) in plain torch, for all other derivatives.
        again: from (gradients, saved, *options) to gradients that can be differentiated, if not by the reference.
        transformed: the outputs under torch.func and forward derivatives, if not by the reference.
        constant: outputs without a gradient, by number.
    """

    def __init__(
        self,
        forward: Callable[..., tuple[Sequence[Tensor], Sequence[Tensor | None]]],
        backward: Callable[..., Sequence[Tensor | None]],
        *,
        n_inputs: int,
        reference: Callable[..., Sequence[Tensor]],
        again: Callable[..., Sequence[Tensor | None]] | None = None,
        transformed: Callable[..., Sequence[Tensor]] | None = None,
        constant: Sequence[int] = (),
    ) -> None:
        self._forward, self._transformed = forward, transformed or reference

        def by_reference(
            gradients: Sequence[Tensor | None], saved: Sequence[Tensor], *options: Any
        ) -> Sequence[Tensor | None]:
            return _differentiable_gradients(lambda *inputs: reference(*inputs, *options), saved[:n_inputs], gradients)

        again_differentiable = again or by_reference

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
                outputs, saved = forward(True, *arguments)
                ctx.set_materialize_grads(len(outputs) == 1)
                ctx.save_for_backward(*saved)
                ctx.options = arguments[n_inputs:]
                if constant:
                    ctx.mark_non_differentiable(*(outputs[i] for i in constant))
                return tuple(outputs)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
                options = ctx.options
                if torch.is_grad_enabled() or is_batch(*gradients):  # the result may be differentiated again
                    found = again_differentiable(gradients, ctx.saved_tensors, *options)
                else:
                    found = backward(gradients, ctx.saved_tensors, ctx.needs_input_grad, *options)
                return (*found, *(None,) * len(options))

        self._function = Function
        # what Function.apply comes to in eager mode, after it has looked for torch.func and unwrapped what that left
        self._record = super(torch.autograd.Function, Function).apply

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Compute the outputs, in the way in which their derivatives can be found."""
        # Asked here, not in a function: Dynamo, having failed at this frame, would compile that one by itself.
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and _transforms():
            return tuple(self._transformed(*arguments))
        if needs_gradient(*arguments):
            return self._function.apply(*arguments) if is_compiling else self._record(*unwrap_dead_wrappers(arguments))
        return tuple(self._forward(False, *arguments)[0])


def _differentiable_gradients(
    reference: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Compute a backward pass through plain torch, so that its result can be differentiated in turn."""
    device = next(x.device.type for x in inputs if x is not None)
    # else nobody asks for a graph: what comes is a batch of gradients
    graph = torch.is_grad_enabled() or (not torch.compiler.is_compiling() and forward_ad._current_level >= 0)
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        # Aliases, because one input can be another or come from it, and each must get only its own share.
        aliases = [None if x is None else x.view_as(x) for x in inputs]
        outputs = reference(*aliases)
        pairs = [(y, dy) for y, dy in zip(outputs, gradients) if y is not None and dy is not None and y.requires_grad]
        wanted = [x for x in aliases if x is not None and x.requires_grad]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs], wanted, [dy for _, dy in pairs], create_graph=graph, materialize_grads=True
            )
        )
        return tuple(next(found) if x is not None and x.requires_grad else None for x in aliases)


def _with_autograd() -> Any:
    """Let autograd record in a kernel, which may run below it, as in a compiled graph: gradients would be zeros."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


class OneNode:
    """A function of tensors as an operator, which a trace for any length takes as one node and runs as in eager mode.

    Loops over steps, pieces or powers of 2 would be unrolled for one length. The backward pass, another operator,
    computes the function again and differentiates that; so it must draw no random numbers.

    Args:
        schema: in torch's notation; tensors come first.
        function: from the arguments to the results.
        allocate: as an `Operator`'s.
        n_inputs: the number of tensors among the arguments, None included; what follows has no gradient.
        flops: counts operations of the forward pass, as an `Operator`'s.
    """

    def __init__(
        self,
        schema: str,
        function: Callable[..., Any],
        allocate: Callable[..., Any],
        *,
        n_inputs: int,
        flops: Callable[..., int] | None = None,
    ) -> None:
        name, _, rest = schema.partition("(")
        given, _, returned = rest.rpartition(") -> ")
        is_single = returned == "Tensor"
        shared: dict[str, Any] = {"check": lambda *_: None, "devices": ("CPU", "CUDA")}

        def several(*arguments: Any) -> tuple[Tensor, ...]:
            return (function(*arguments),) if is_single else function(*arguments)

        def fill(results: Any, *arguments: Any) -> None:
            for place, result in zip((results,) if is_single else results, several(*arguments)):
                place.copy_(result)

        def fill_back(results: list[Tensor], gradients: Sequence[Tensor | None], *arguments: Any) -> None:
            inputs = [None if x is None else x.detach().requires_grad_() for x in arguments[:n_inputs]]
            run = lambda *tensors: several(*tensors, *arguments[n_inputs:])  # noqa: E731
            with _with_autograd():
                found = _differentiable_gradients(run, inputs, gradients)
            for place, gradient in zip(results, found):
                if gradient is not None:
                    place.copy_(gradient)

        def forward(keep: bool, *arguments: Any) -> tuple[tuple, tuple]:
            results = self._forward(*arguments)
            return (results,) if is_single else results, arguments[:n_inputs]

        def backward(gradients: tuple, saved: tuple, needs: tuple, *options: Any) -> list[Tensor | None]:
            found = self._backward(list(gradients), *saved, *options)
            return [gradient if need else None for gradient, need in zip(found, needs)]

        def record(*arguments: Any) -> Any:
            results = differentiable(*arguments)
            return results[0] if is_single else results

        differentiable = Differentiable(forward, backward, n_inputs=n_inputs, reference=several)
        self._forward = Operator(schema, allocate=allocate, run=fill, flops=flops, **shared)
        self._forward.record = record
        self._backward = Operator(
            f"{name}_backward(Tensor?[] gradients, {given}) -> Tensor[]",
            allocate=lambda _, *arguments: [
                arguments[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in arguments[:n_inputs]
            ],
            run=fill_back,
            flops=None if flops is None else lambda _, *arguments: 3 * flops(*arguments),
            **shared,
        )

    def __call__(self, *arguments: Any) -> Any:
        """Put the node into the trace."""
        return self._forward.bare(*arguments)


def keeping(operator: Operator, back: Operator, n_inputs: int, n_outputs: int, **derivatives: Any) -> Differentiable:
    """Make an operator that keeps tensors for `back` differentiable, also where a trace calls it bare.

    Args:
        operator: from (*inputs, keep, *options) to the outputs and what is kept: empty tensors unless `keep`.
        back: from (*gradients, *inputs, *kept, *options) to the inputs' gradients.
        n_inputs, n_outputs: the numbers of inputs, and of outputs before what is kept.
        derivatives: `reference` and `transformed` of a `Differentiable`.
    """

    def forward(keep: bool, *given: Any) -> tuple[tuple, tuple]:
        results = operator.behind_door(*given[:n_inputs], keep, *given[n_inputs:])
        return results, (*given[:n_inputs], *results[n_outputs:])

    def backward(gradients: tuple, saved: tuple, needs: tuple, *options: Any) -> Sequence[Tensor]:
        return back(*gradients[:n_outputs], *saved, *options)

    def record(*given: Any) -> tuple[Tensor, ...]:
        results = differentiable(*given[:n_inputs], *given[n_inputs + 1 :])
        kept = results[n_outputs:] if given[n_inputs] else [x.new_empty(0) for x in results[n_outputs:]]
        return *results[:n_outputs], *kept

    kept = range(n_outputs, len(operator.bare._schema.returns))
    differentiable = Differentiable(forward, backward, n_inputs=n_inputs, constant=kept, **derivatives)
    operator.record = record
    return differentiable


HALF = (torch.float16, torch.bfloat16)  # which are computed in float32

_CACHE_LINE = 64  # rows are split at multiples of this many floats, so that no two jobs share a cache line


def last_dim_contiguous(tensor: Tensor) -> Tensor:
    """Return `tensor`, which `has_numbers`, with its last dimension dense in memory; strides of 0 elsewhere stay."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def addresses(*tensors: Tensor) -> list[int]:
    """Return where the numbers of dense tensors begin."""
    return [tensor.data_ptr() for tensor in tensors]


def require_layouts(
    dtype: torch.dtype, device: torch.device, /, **named: tuple[Tensor | None, tuple[int, ...]]
) -> None:
    """Refuse tensors that do not have the shape given with them, or this dtype and device; None is skipped."""
    for name, (tensor, shape) in named.items():
        if tensor is not None:
            require_layout(name, tensor, shape, dtype, device)


def describe(tensor: Tensor) -> tuple[int, int, int]:
    """Describe a (B, L, D) or (B, L, D, 1) tensor to a kernel: (address, batch stride, time stride), in floats."""
    batch, time, *_ = tensor.stride()
    return (tensor.data_ptr(), 2 * batch, 2 * time) if tensor.is_complex() else (tensor.data_ptr(), batch, time)


def usable_threads() -> int:
    """Return the number of threads that a kernel may use: torch's, but one in a forked child."""
    return 1 if is_forked_child() else torch.get_num_threads()


def span_of_job(row: int, batch: int) -> int:
    """Return the floats per job that give every thread work: a whole row if there are enough sequences."""
    parts = -(-usable_threads() // batch)
    span = -(-row // parts)
    return min(row, -(-span // _CACHE_LINE) * _CACHE_LINE)
