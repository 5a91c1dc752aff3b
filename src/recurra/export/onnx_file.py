"""A language model as one ONNX file, for whole texts and single tokens: any batch and length, the state in and out.

    inputs    tokens (batch, length) int64, and per state tensor  state.NAME       (batch, ...) float32
    outputs   logits (batch, length, V),    and per state tensor  next_state.NAME  (batch, ...) float32

A stream starts from zeros. Complex tensors have a last dimension of 2, real and imaginary part. The file's metadata
say all that is needed to run it:

    recurra.state       JSON: a list of {"name", "shape" (without the batch), "dtype", "complex"}
    recurra.vocab_size  tokens that may come in
    recurra.class, recurra.config, recurra.version   the model it was, its configuration as JSON, this package
    recurra.tokenizer   JSON as the package tokenizers reads it, where the model has one
"""

import json
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import onnx
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic

import recurra
from recurra.export.onnx_model import OnnxModel
from recurra.export.planes import RealProgram
from recurra.export.programs import StateTensor, prefill_program, zero_state
from recurra.export.translations import OPSET, TRANSLATIONS
from recurra.models import LanguageModelShell

LARGEST_DIFFERENCE = 1e-4
"""Largest difference of logits, as a share of the largest: rounding makes about 1e-6, 1e-5 in deep models."""
LARGEST_FILE = 2**31 - 2**20
"""Bytes of weights that an ONNX file can hold beside its graph."""
_LENGTHS = ((1, 33), (3, 7))  # batch and length of the comparison; neither is what the graph was traced with


def to_onnx(model: LanguageModelShell, *, tokenizer: str | None = None) -> onnx.ModelProto:
    """Return a model as an ONNX graph with its metadata.

    Args:
        model: a language model on the CPU, in float32.
        tokenizer: JSON as the package tokenizers reads it, kept with the graph.

    Raises:
        ValueError: the model cannot be exported; the message says why.
    """
    n_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if n_bytes > LARGEST_FILE:
        raise ValueError(f"the weights are {n_bytes / 2**30:.1f} GiB; expected at most 2, which an ONNX file can hold")
    with quietly():
        traced = prefill_program(model, batch=None)
        program = RealProgram(traced.program).eval()
        names = [tensor.name for tensor in traced.state]
        batch = {0: "batch"}
        try:
            with torch.no_grad():
                exported = torch.onnx.export(
                    program,
                    (torch.zeros(2, 5, dtype=torch.int64), *zero_state(traced.state, 2)),
                    dynamo=True,
                    opset_version=OPSET,
                    input_names=["tokens", *(f"state.{name}" for name in names)],
                    output_names=["logits", *(f"next_state.{name}" for name in names)],
                    dynamic_shapes=((batch | {1: "length"}, *(batch for _ in names)),),
                    custom_translation_table=TRANSLATIONS,
                    verbose=False,
                )
        except torch.onnx.OnnxExporterError as error:  # an operator of a mixer that is not of this package
            raise ValueError(f"the model cannot be written in ONNX: {error}") from error
    assert exported is not None
    graph = exported.model_proto
    for key, value in _metadata(model, traced.state, tokenizer).items():
        graph.metadata_props.add(key=f"recurra.{key}", value=value)
    return graph


def to_int8(graph: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph whose matrices are kept as 8-bit integers, and whose input vectors are rounded to 8 bits.

    Of the 8 bits of a weight, 7 are used: on processors without VNNI instructions, onnxruntime adds two products of 8
    bits in 16, where they overflow in silence.
    """
    with tempfile.TemporaryDirectory() as folder, quietly():
        path = Path(folder) / "int8.onnx"
        quantize_dynamic(graph, path, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)
        return onnx.load(path)


@torch.inference_mode()
def largest_difference(model: LanguageModelShell, exported: OnnxModel) -> float:
    """Compare the logits of a file with those of its model: whole texts of two lengths, and one token at a time.

    Returns:
        the largest difference over the largest logit; NaN if there is one.
    """
    differences = []
    was_training = model.training
    model.eval()
    for batch, length in _LENGTHS:
        tokens = torch.randint(
            model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(length)
        )
        logits = model(tokens)[0]
        whole, _ = exported(tokens.numpy())
        pieces, state = [], None
        for token in tokens.split(1, 1):
            piece, state = exported(token.numpy(), state)
            pieces.append(torch.from_numpy(piece))
        for found in (torch.from_numpy(whole), torch.cat(pieces, 1)):
            differences.append((found - logits).abs().max() / logits.abs().max())
    model.train(was_training)
    return float(torch.stack(differences).max())


def _metadata(model: LanguageModelShell, state: tuple[StateTensor, ...], tokenizer: str | None) -> dict[str, str]:
    tensors = [
        {"name": tensor.name, "shape": tensor.shape, "dtype": "float32", "complex": tensor.is_complex}
        for tensor in state
    ]
    known = {
        "class": type(model).__name__,
        "config": json.dumps(asdict(model.config)),
        "version": recurra.__version__,
        "vocab_size": str(model.config.vocab_size),
        "state": json.dumps(tensors),
    }
    return known if tokenizer is None else known | {"tokenizer": tokenizer}


@contextmanager
def quietly() -> Iterator[None]:
    """Silence what tracers say about missing packages and about their own deprecated code."""
    loggers = [logging.getLogger(name) for name in (None, "torch.onnx._internal.exporter._registration")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
