"""Converted models in onnxruntime; those that cannot be exported say why."""

import pytest

from recurra.convert.published.folder import from_huggingface

pytestmark = pytest.mark.compile  # while torch.export traces, sizes are symbols, which the shape checks refuse

REFUSED = {
    "recurrent-gemma": "RotaryAttention keeps the last steps themselves",
    "jamba": "RotaryAttention keeps the last steps themselves",
}


@pytest.mark.parametrize("name", ["falcon-mamba", "jamba-without-attention", "xlstm", "rwkv"])
def test_the_graph_computes_what_the_model_computes(name, peers):
    pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install recurra[onnx]")
    from recurra.convert.export.onnx_file import OnnxModel, largest_difference, to_onnx

    model = from_huggingface(peers(name)[1]).model
    assert largest_difference(model, OnnxModel(to_onnx(model).SerializeToString())) <= 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_says_why(name, peers):
    model = from_huggingface(peers(name)[1]).model
    assert REFUSED[name] in model.why_not_exportable()
