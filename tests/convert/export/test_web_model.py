"""The step for web pages: the graph computes what the model with rounded weights computes, its transitions included."""

import io
from functools import cache

import numpy as np
import pytest
import torch

pytest.importorskip("onnx", reason="needs the extra export: pip install recurra[export]")
pytest.importorskip("onnxscript", reason="needs the extra export: pip install recurra[export]")
pytest.importorskip("onnxruntime", reason="needs the extra export: pip install recurra[export]")

import onnx
import onnxruntime
from onnx import numpy_helper

from recurra.analysis.gates import record_gates
from recurra.convert.export.programs import gate_layers
from recurra.convert.export.web import _WebModel, to_web_model, web_difference
from recurra.decoding.steps import prepare
from recurra.models.language_model import LanguageModel, LanguageModelConfig

pytestmark = pytest.mark.compile  # while torch.export traces, sizes are symbols, which the shape checks refuse

GATELOOP = {"gateloop": {"n_heads": 3, "d_v": 9}}
MIXERS = {"int8": GATELOOP, "float16": {"mamba": {"d_state": 3}}, "float32": {**GATELOOP, "rg-lru": {}}}
WEIGHTS = ["int8", *(pytest.param(weights, marks=pytest.mark.slow) for weights in ("float16", "float32"))]
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def make_model(weights: str) -> LanguageModel:
    torch.manual_seed(0)
    names = [*MIXERS[weights]]
    names += names[1:] if weights == "float32" else []  # each RG-LRU says in its state that it has begun
    config = LanguageModelConfig(
        vocab_size=11,
        n_layer=len(names),
        d_model=6,
        d_channel_mixing=7,
        mixer=names,
        mixer_options=MIXERS[weights],
        tie_embeddings=True,
    )
    return LanguageModel(config).eval()


@cache
def exported_with(weights: str) -> _WebModel:
    return to_web_model(make_model(weights), weights)


def run_steps(content: bytes, state_shapes: dict[str, tuple[int, ...]]) -> list[np.ndarray]:
    """Logits, |a| and phases of all tokens, one after the other, in onnxruntime."""
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    state = {f"state.{name}": np.zeros((1, *shape), np.float32) for name, shape in state_shapes.items()}
    rows = []
    for token in TOKENS:
        (*row,) = session.run(None, {"token": np.array([[token]]), **state})
        state = dict(zip(state, row[3:]))
        rows.append([part.reshape(-1) for part in row[:3]])
    return [np.stack(parts) for parts in zip(*rows)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_graph_computes_what_the_model_computes(weights):
    model = make_model(weights)
    exported = exported_with(weights)
    limit = 1e-2 if weights == "int8" else 2e-5  # an input between two codes can be rounded to either
    assert web_difference(exported) < limit
    logits, magnitudes, phases = run_steps(exported.content, {part.name: part.shape for part in exported.state})
    twin = {"int8": lambda: prepare(model, "int8"), "float16": lambda: halved(model), "float32": lambda: model}[
        weights
    ]()
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        expected, state = [], None
        for token in tokens.split(1, 1):
            piece, state = twin(token, state)
            expected.append(piece[0, 0])
    np.testing.assert_allclose(logits, torch.stack(expected), atol=limit * float(torch.stack(expected).abs().max()))
    if weights == "float32":
        record = record_gates(model, tokens)
        for found, parts in ((magnitudes, record.magnitudes), (phases, record.phases)):
            np.testing.assert_allclose(found, torch.cat(parts, -1)[0], atol=1e-5)


def halved(model: LanguageModel) -> LanguageModel:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.half())
    return model


def test_layers_with_gates():
    assert [tuple(layer) for layer in gate_layers(make_model("float32"))] == [(0, 6), (1, 6), (2, 6)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_are_stored_in_fewer_bits_and_once(weights):
    graph = onnx.load_model(io.BytesIO(exported_with(weights).content)).graph
    stored = [numpy_helper.to_array(tensor) for tensor in graph.initializer]
    matrices = [values for values in stored if values.ndim > 1 and values.dtype.kind in "fi" and values.size > 12]
    assert len({(values.shape, values.tobytes()) for values in matrices}) == len(matrices)
    sizes = {kind: sum(m.size for m in matrices if m.dtype == kind) for kind in ("int8", "float16", "float32")}
    if weights == "float16":
        assert sizes["float16"] > 10 * sizes["float32"]
    elif weights == "int8":
        assert sizes["int8"] > sizes["float32"]  # the embedding, and what is no linear layer
    else:
        assert sizes["int8"] == sizes["float16"] == 0
