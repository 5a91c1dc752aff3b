"""Language models as torch.export programs, in which the state comes in and goes out, and these in real numbers."""

import math
import operator
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_any, tree_leaves_with_path, tree_map_only

import recurra.mixers.gru
import recurra.ops.cells.slstm
import recurra.ops.delta_rule.generalised
import recurra.ops.delta_rule.operator
import recurra.ops.gate_loop._heads
import recurra.ops.gate_loop.fused
import recurra.ops.scan.reference
import recurra.ops.selective_scan  # noqa: F401
from recurra.checks import kind_of, sentence
from recurra.models.shell import LanguageModelShell, evenly_spaced, mixers_with_transition, transition_of
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
        hint = "use model.float(), or for a run `recurra convert RUN NEW_RUN --to run --dtype float32`"
        raise ValueError(f"the model's parameters are of type {names}; expected float32: {hint}")
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise ValueError(f"the model is on {device}; expected it on the CPU: use model.cpu()")
    return model


# recurra::complex_scan: a complex linear_scan in planes (B, L, D) and (B, D), for graphs of real numbers
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


def _one_step_complex_scan(*planes: Tensor) -> tuple[Tensor, Tensor]:
    a_re, a_im, b_re, b_im, h0_re, h0_im = planes
    re, im = h0_re.unsqueeze(1), h0_im.unsqueeze(1)
    return a_re * re - a_im * im + b_re, a_re * im + a_im * re + b_im


AT_ONE_STEP: dict[Any, Callable[..., Any]] = {
    torch.ops.recurra.linear_scan.default: lambda a, b, h0, *_: a * h0.unsqueeze(1) + b,
    torch.ops.recurra.complex_scan.default: _one_step_complex_scan,
}
"""Decompositions for `ExportedProgram.run_decompositions`."""


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
    found = []
    for path, x in tree_leaves_with_path(model.initial_state(1)):
        if isinstance(x, Tensor):
            name = ".".join(str(getattr(key, "name", getattr(key, "idx", key))) for key in path)
            shape = tuple(x.shape[1:]) + ((2,) if x.is_complex() else ())
            found.append(StateTensor(name, shape, x.is_complex()))
    return tuple(found)


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


_MOST_CHANNELS = 64  # of a layer, evenly spaced


class GateLayer(NamedTuple):
    """A layer whose transition a gated program returns.

    layer: its number, from 0. channels: how many numbers the program returns for each of |a| and the phase.
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
        self.mixers = mixers_with_transition(model)

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
            magnitude, phase = transition_of(mixer, *arguments)
            gates.append((_shown(magnitude), _shown(phase)))

        with ExitStack() as afterwards:
            for mixer in self.mixers.values():
                afterwards.callback(mixer.register_forward_pre_hook(keep).remove)
            return super().forward(tokens, *state), gates


def _shown(values: Tensor) -> Tensor:
    """Take the channels that the page shows."""
    n = values.shape[-1]
    return values if n <= _MOST_CHANNELS else values[..., torch.tensor(evenly_spaced(n, _MOST_CHANNELS))]


_aten: Any = torch.ops.aten
_VIEWS = {
    *(_aten.permute.default, _aten.view.default, _aten.expand.default, _aten.unsqueeze.default, _aten.alias.default),
    *(_aten.select.int, _aten.slice.Tensor, _aten.reshape.default, _aten.transpose.int, _aten.flatten.using_ints),
    _aten.squeeze.dim,
}
_CHECK = _aten._assert_tensor_metadata.default  # of types, which complex numbers do not have here
_MAKERS = {_aten.complex.default, _aten.polar.default, _aten.view_as_complex.default}


class _Complex(NamedTuple):
    """A complex tensor as its planes."""

    re: Tensor
    im: Tensor


class RealProgram(nn.Module):
    """A program of real inputs and outputs without complex tensors in between; computes what `program` computes.

    ONNX has no complex numbers. Its graph is traced again through this, which runs a program operator by operator and
    carries a complex tensor as a pair (real, imaginary).
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self.operators = _without_constants(program)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the program, operator by operator."""
        return tuple(_InPlanes(self.operators).run(*inputs))


class _InPlanes(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, on planes if a tensor is complex."""
        if target == _CHECK:
            return None
        if target == torch.ops.recurra.gate_loop_fused.default:
            return _fused(*args)
        if target == torch.ops.higher_order.wrap_with_autocast:  # a part that autocast leaves alone, as it does here
            return _InPlanes(args[4]).run(*args[5:])
        makes_complex = target in _MAKERS or (target == _aten.to.dtype and args[1].is_complex)
        if not makes_complex and not tree_any(lambda x: isinstance(x, _Complex), (args, kwargs), _is_complex):
            found = super().call_function(target, args, kwargs)
            makes_complex = isinstance(found, Tensor) and found.is_complex()
            if not makes_complex:
                return found
        if target not in _RULES:
            raise ValueError(f"the operator {target} on complex numbers cannot be written in real ones")
        return _RULES[target](target, *args, **kwargs)


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    x0_re: Tensor,
    x0_im: Tensor | None,
    keep_states: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """GateLoop (7)-(8) for one channel a head, as a scan: Re y, and all states or the last."""
    drive, kept = k * v, slice(None) if keep_states else slice(-1, None)
    if a_im is None or x0_im is None:
        h = torch.ops.recurra.linear_scan(a_re, drive, x0_re, False)
        return q * h, h[:, kept], h[:, kept]
    re, im = torch.ops.recurra.complex_scan(a_re, a_im, drive, torch.zeros_like(drive), x0_re, x0_im)
    return q * re, re[:, kept], im[:, kept]


def _is_complex(x: Any) -> bool:
    return isinstance(x, _Complex)


def _planes(x: Tensor | _Complex) -> _Complex:
    return x if isinstance(x, _Complex) else _Complex(x, torch.zeros_like(x))


def _on_both(target: Any, *args: Any, **kwargs: Any) -> _Complex:
    """Apply an operator that treats both planes alike."""
    planes = (tree_map_only(_Complex, operator.itemgetter(plane), args, _is_complex) for plane in (0, 1))
    return _Complex(*(target(*plane, **kwargs) for plane in planes))


def _multiply(target: Any, x: Any, y: Any) -> _Complex:
    if isinstance(x, _Complex) and isinstance(y, _Complex):
        return _Complex(x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re)
    z, factor = (x, y) if isinstance(x, _Complex) else (y, x)
    return _Complex(z.re * factor, z.im * factor)


def _add(target: Any, x: Any, y: Any) -> _Complex:
    return _Complex(*(target(one, other) for one, other in zip(_planes(x), _planes(y))))


def _convert(target: Any, x: Any, dtype: torch.dtype, *_: Any, **__: Any) -> _Complex:
    if not dtype.is_complex:
        raise ValueError("a conversion of complex numbers to real ones cannot be exported: take .real or .imag")
    return _planes(x)


def _scan(target: Any, a: Any, b: Any, h0: Any, reverse: bool, backend: str) -> _Complex:
    if reverse:
        raise ValueError("a complex scan from the last step to the first cannot be exported")
    return _Complex(*torch.ops.recurra.complex_scan(*_planes(a), *_planes(b), *_planes(h0)))


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_VIEWS | {_aten.clone.default, _aten.neg.default, _aten.sum.dim_IntList}, _on_both),
    **dict.fromkeys([_aten.stack.default, _aten.cat.default], _on_both),
    operator.getitem: lambda target, outputs, number: outputs[number],
    _aten.expand_as.default: lambda target, x, y: _on_both(target, x, y) if _is_complex(x) else target(x, y.re),
    _aten.complex.default: lambda target, re, im: _Complex(re, im),
    _aten.polar.default: lambda target, r, phase: _Complex(r * phase.cos(), r * phase.sin()),
    _aten.view_as_complex.default: lambda target, x: _Complex(x[..., 0], x[..., 1]),
    _aten.view_as_real.default: lambda target, x: torch.stack([x.re, x.im], -1),
    _aten.to.dtype: _convert,
    _aten.real.default: lambda target, x: x.re,
    _aten.imag.default: lambda target, x: x.im,
    _aten.resolve_conj.default: lambda target, x: x,
    _aten.mul.Tensor: _multiply,
    _aten.add.Tensor: _add,
    _aten.sub.Tensor: _add,
    torch.ops.recurra.linear_scan.default: _scan,
}


def _without_constants(program: ExportedProgram) -> fx.GraphModule:
    """Return the graph with nothing but a call's inputs; what depends on none of them is computed now."""
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, copies))
    for node in [node for node in graph.nodes if node.target == _CHECK]:
        graph.erase_node(node)
    weights = {copies[node]: (name, value) for node, (name, value) in _weights(program).items()}
    values = _known(graph, {node: value for node, (_, value) in weights.items()})
    parts = [node.target for node in graph.nodes if node.op == "get_attr"]
    attributes: dict[str, Any] = {name: getattr(program.graph_module, name) for name in parts}
    for number, (node, value) in enumerate(values.items()):
        if node in weights or _is_view_of_weight(node, weights) or all(user in values for user in node.users):
            continue
        name = f"computed_{number}"
        attributes[name] = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        with graph.inserting_before(node):
            known = graph.get_attr(name)
            if value.is_complex():
                known = graph.call_function(_aten.view_as_complex.default, (known,))
        node.replace_all_uses_with(known)
    graph.eliminate_dead_code()
    for node, (name, value) in weights.items():
        if node.users:
            attributes[name] = value
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(name))
        graph.erase_node(node)
    return fx.GraphModule(attributes, graph)


def _weights(program: ExportedProgram) -> dict[fx.Node, tuple[str, Tensor]]:
    """The inputs of the graph that are weights, buffers and constants, with their names."""
    kept = {**program.state_dict, **program.constants}
    targets = {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    }
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in targets]
    return {node: (str(targets[node.name]).removeprefix("model."), kept[targets[node.name]]) for node in nodes}


@torch.no_grad()
def _known(graph: fx.Graph, weights: dict[fx.Node, Tensor]) -> dict[fx.Node, Any]:
    """Compute what follows from weights alone."""
    values: dict[fx.Node, Any] = dict(weights)
    for node in graph.nodes:
        if node.op == "call_function" and all(source in values for source in node.all_input_nodes):
            args, kwargs = (fx.map_arg(given, values.__getitem__) for given in (node.args, node.kwargs))
            values[node] = node.target(*args, **kwargs)
    return values


def _is_view_of_weight(node: fx.Node, weights: Any) -> bool:
    """Whether a node is a view of a weight: computing it now would only keep the weight twice."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node in weights


def step_to_executorch(model: LanguageModelShell, *, batch: int = 1) -> bytes:
    """Write a model's step for ExecuTorch, PyTorch's runtime for small devices.

    At one step a recurrence is a product and a sum, so that the file needs ExecuTorch's portable operators alone.

    Args:
        model: a language model on the CPU, in float32.
        batch: number of streams, which is fixed.

    Returns:
        the content of a .pte file whose method `forward(tokens, *state)` returns `(logits, *state)`: tokens (batch, 1),
        and the tensors of `state_tensors` in this order and in float32, complex ones with a last dimension of 2. A
        stream starts from zeros.
    """
    from executorch.exir import to_edge

    step = step_program(model, batch=batch)
    arguments = torch.zeros(batch, 1, dtype=torch.int64), *zero_state(step.state, batch)
    # ExecuTorch has no exp2
    exp2 = {torch.ops.aten.exp2.default: lambda x: torch.exp(x * math.log(2))}
    with torch.no_grad():
        program = torch.export.export(RealProgram(step.program).eval(), arguments, strict=False)
        program = program.run_decompositions(default_decompositions() | AT_ONE_STEP | exp2)
        return bytes(to_edge(program).to_executorch().buffer)
