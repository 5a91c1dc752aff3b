"""A traced program in real arithmetic: complex tensors become two planes; what depends on weights alone is computed.

ONNX has no complex numbers. Its graph is traced again through `RealProgram`, which runs a torch.export program operator
by operator and carries a complex tensor as a pair (real, imaginary).
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_any, tree_map_only

from recurra.convert.export import programs as operators  # noqa: F401  registers recurra::complex_scan

_aten: Any = torch.ops.aten
_VIEWS = {
    *(_aten.permute.default, _aten.view.default, _aten.expand.default, _aten.unsqueeze.default, _aten.alias.default),
    *(_aten.select.int, _aten.slice.Tensor, _aten.reshape.default, _aten.transpose.int, _aten.flatten.using_ints),
}
_CHECK = _aten._assert_tensor_metadata.default  # of types, which complex numbers do not have here
_MAKERS = {_aten.complex.default, _aten.view_as_complex.default}


class _Complex(NamedTuple):
    """A complex tensor as its planes."""

    re: Tensor
    im: Tensor


class RealProgram(nn.Module):
    """A program of real inputs and outputs without complex tensors in between; computes what `program` computes."""

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
        if target == torch.ops.higher_order.wrap_with_autocast:  # a part that autocast leaves alone, as it does here
            return _InPlanes(args[4]).run(*args[5:])
        makes_complex = target in _MAKERS or (target == _aten.to.dtype and args[1].is_complex)
        if not makes_complex and not tree_any(lambda x: isinstance(x, _Complex), (args, kwargs), _is_complex):
            return super().call_function(target, args, kwargs)
        if target not in _RULES:
            raise ValueError(f"the operator {target} on complex numbers cannot be written in real ones")
        return _RULES[target](target, *args, **kwargs)


def _is_complex(x: Any) -> bool:
    return isinstance(x, _Complex)


def _planes(x: Tensor | _Complex) -> _Complex:
    return x if isinstance(x, _Complex) else _Complex(x, torch.zeros_like(x))


def _on_both(target: Any, *args: Any, **kwargs: Any) -> _Complex:
    """Apply an operator that treats both planes alike."""
    return _Complex(*(target(*_plane(args, plane), **kwargs) for plane in (0, 1)))


def _plane(args: Any, plane: int) -> Any:
    return tree_map_only(_Complex, lambda x: x[plane], args, _is_complex)


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
    _aten.complex.default: lambda target, re, im: _Complex(re, im),
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
