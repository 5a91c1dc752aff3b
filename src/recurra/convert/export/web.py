"""A language model's step as an ONNX graph for web pages: one token of one stream, with its transitions.

    inputs    token (1, 1) int64, and per state tensor  state.NAME       (1, ...) float32
    outputs   logits (1, 1, V), magnitudes (1, C), phases (1, C), and    next_state.NAME  (1, ...)

Weights are stored in fewer bits, and widened to float32 when a runtime loads the graph: the arithmetic is float32
throughout, so that the outputs are those of a model in Python with the same rounded weights.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch.export import default_decompositions

from recurra.checks import require_literal
from recurra.convert.export.onnx_file import OPSET, tracing
from recurra.convert.export.programs import (
    AT_ONE_STEP,
    GatedModel,
    GateLayer,
    RealProgram,
    StateTensor,
    gated_step_program,
    zero_state,
)
from recurra.decoding._products import rounded
from recurra.decoding.linear import DecodingLinear
from recurra.decoding.packing import exact_modules, pack_linear_layers
from recurra.models.shell import LanguageModelShell

_Weights: TypeAlias = Literal["int8", "float16", "float32"]
"""How weights can be stored. "int8" rounds linear layers and inputs as `recurra generate --weights int8` does, and
nothing else; "float16" rounds all matrices."""


class _WebModel(NamedTuple):
    """A graph and what a page has to know of it."""

    content: bytes
    state: tuple[StateTensor, ...]
    gates: tuple[GateLayer, ...]
    rounded: LanguageModelShell


def to_web_model(model: LanguageModelShell, weights: str = "int8") -> _WebModel:
    """Write a model's step as an ONNX graph for web pages.

    Args:
        model: a language model on the CPU, in float32.
        weights: "int8", "float16" or "float32".
    """
    require_literal(_Weights, weights=weights)
    twin, codes = _rounded(model, weights)
    with tracing(), torch.no_grad():
        step, gates = gated_step_program(twin)
        names = [tensor.name for tensor in step.state]
        arguments = torch.zeros(1, 1, dtype=torch.int64), *zero_state(step.state, 1)
        program = torch.export.export(RealProgram(step.program).eval(), arguments, strict=False)
        exported = torch.onnx.export(
            program.run_decompositions(default_decompositions() | AT_ONE_STEP),
            dynamo=True,
            opset_version=OPSET,
            input_names=["token", *(f"state.{name}" for name in names)],
            output_names=["logits", "magnitudes", "phases", *(f"next_state.{name}" for name in names)],
            verbose=False,
        )
    assert exported is not None
    graph = exported.model_proto
    _share_equal_matrices(graph.graph)
    _store_in_fewer_bits(graph.graph, codes, halves=weights == "float16")
    return _WebModel(graph.SerializeToString(), step.state, gates, twin)


@torch.inference_mode()
def web_difference(exported: _WebModel, n_tokens: int = 24) -> float:
    """Compare a graph in onnxruntime with its model, token by token: logits and transitions."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(exported.content, options, providers=["CPUExecutionProvider"])
    names = [tensor.name for tensor in exported.state]
    mine = zero_state(exported.state, 1)
    theirs = {f"state.{name}": tensor.numpy() for name, tensor in zip(names, mine)}
    gated = GatedModel(exported.rounded)
    tokens = torch.randint(exported.rounded.config.vocab_size, (n_tokens,), generator=torch.Generator().manual_seed(0))
    largest = torch.zeros(())
    for token in tokens.view(-1, 1, 1):
        logits, magnitudes, phases, *mine = gated(token, *mine)
        found = [torch.from_numpy(part) for part in session.run(None, {"token": token.numpy(), **theirs})]
        theirs = {f"state.{name}": part.numpy() for name, part in zip(names, found[3:])}
        scale = logits.abs().max()
        largest = torch.stack(
            [largest, _gap(found[0], logits) / scale, _gap(found[1], magnitudes), _gap(found[2], phases)]
        ).max()
    return float(largest)


def _gap(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).abs().max() if expected.numel() else torch.zeros(())


_Codes = dict[bytes, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
"""Quantised matrices by the bytes of their rounded values: whole numbers and the scale of each row."""


def _rounded(model: LanguageModelShell, weights: str) -> tuple[LanguageModelShell, _Codes]:
    """Copy a model with rounded weights, all of them float32 again."""
    twin = pack_linear_layers(model, "int8" if weights == "int8" else "float32")
    codes: _Codes = {}
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if isinstance(child, DecodingLinear):
                setattr(parent, name, _plain_linear(child, codes))
    if weights == "float16":
        halved: dict[int, nn.Parameter] = {}
        exact = exact_modules(twin)
        for module in [module for module in twin.modules() if module not in exact]:
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.dim() > 1:
                    half = halved.setdefault(id(parameter), nn.Parameter(parameter.detach().half().float(), False))
                    setattr(module, name, half)
    return twin, codes


class _RoundingLinear(nn.Linear):
    """A linear layer whose inputs are rounded as `recurra generate --weights int8` does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(rounded(x))


def _plain_linear(layer: DecodingLinear, codes: _Codes) -> nn.Linear:
    weight = layer.weight.detach()
    kind = _RoundingLinear if layer.dtype == "int8" else nn.Linear
    linear = kind(layer.in_features, layer.out_features, device="meta")
    linear.weight, linear.bias = nn.Parameter(weight, False), nn.Parameter(layer.bias, False)
    if layer.dtype == "int8":
        scale = layer.scale.unsqueeze(1)
        whole = (weight / scale).round().to(torch.int8)
        codes[weight.numpy().tobytes()] = whole.numpy(), scale.numpy()
        codes[weight.T.contiguous().numpy().tobytes()] = whole.T.contiguous().numpy(), scale.T.contiguous().numpy()
    return linear.eval()


def _share_equal_matrices(graph: onnx.GraphProto) -> None:
    """Keep equal matrices once: a transition is in the graph twice, for its layer and for the outputs."""
    first: dict[tuple[tuple[int, ...], str, bytes], str] = {}
    instead: dict[str, str] = {}
    outputs = {output.name for output in graph.output}  # which keep their names
    for stored in list(graph.initializer):
        values = numpy_helper.to_array(stored)
        if values.ndim < 2 or stored.name in outputs:
            continue
        name = first.setdefault((values.shape, values.dtype.str, values.tobytes()), stored.name)
        if name != stored.name:
            instead[stored.name] = name
            graph.initializer.remove(stored)
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = instead.get(name, name)


def _store_in_fewer_bits(graph: onnx.GraphProto, codes: _Codes, *, halves: bool) -> None:
    """Replace matrices by their codes and scales, or by float16 numbers, and nodes that widen them."""
    nodes: list[onnx.NodeProto] = []
    for stored in [tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]:
        values = numpy_helper.to_array(stored)
        if values.ndim < 2:
            continue
        found = codes.get(np.ascontiguousarray(values).tobytes())
        if found is not None and found[0].shape == values.shape:
            narrow, scale = found
        elif halves and np.array_equal(values.astype(np.float16).astype(np.float32), values):
            narrow, scale = values.astype(np.float16), None
        else:
            continue
        name = stored.name
        graph.initializer.remove(stored)
        graph.initializer.append(numpy_helper.from_array(narrow, f"{name}.narrow"))
        wide = name if scale is None else f"{name}.wide"
        nodes.append(helper.make_node("Cast", [f"{name}.narrow"], [wide], to=onnx.TensorProto.FLOAT))
        if scale is not None:
            graph.initializer.append(numpy_helper.from_array(scale, f"{name}.scale"))
            nodes.append(helper.make_node("Mul", [wide, f"{name}.scale"], [name]))
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])
