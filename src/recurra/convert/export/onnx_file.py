"""A language model as one ONNX file, for whole texts and single tokens, and that file in onnxruntime."""

import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxscript import FLOAT, graph, script
from onnxscript import opset18 as op
from onnxscript.values import Opset

import recurra
from recurra._files.reading import parse_json
from recurra.checks import sentence
from recurra.convert.export.programs import RealProgram, prefill_program, zero_state
from recurra.models.shell import LanguageModelShell

OPSET = 18
"""The version of ONNX operators that files are written in."""

_domain = Opset("recurra", 1)  # of this package's operators: a recurrence is one operator Scan


@script(_domain, default_opset=op)
def _real_scan(a: FLOAT, b: FLOAT, h0: FLOAT) -> FLOAT:
    """h_t = a_t h_{t-1} + b_t along axis 1."""

    @graph()
    def step(h_before, a_t, b_t):  # type: ignore[no-untyped-def]
        h_now = op.Add(op.Mul(a_t, h_before), b_t)
        return h_now, op.Identity(h_now)

    _last, h = op.Scan(h0, a, b, body=step, num_scan_inputs=2, scan_input_axes=[1, 1], scan_output_axes=[1])
    return h


@script(_domain, default_opset=op)
def _complex_scan(
    a_re: FLOAT, a_im: FLOAT, b_re: FLOAT, b_im: FLOAT, h0_re: FLOAT, h0_im: FLOAT
) -> tuple[FLOAT, FLOAT]:
    """The same for complex numbers in two planes."""

    @graph()
    def step(re_before, im_before, a_re_t, a_im_t, b_re_t, b_im_t):  # type: ignore[no-untyped-def]
        re_now = op.Add(op.Sub(op.Mul(a_re_t, re_before), op.Mul(a_im_t, im_before)), b_re_t)
        im_now = op.Add(op.Add(op.Mul(a_re_t, im_before), op.Mul(a_im_t, re_before)), b_im_t)
        return re_now, im_now, op.Identity(re_now), op.Identity(im_now)

    _last_re, _last_im, h_re, h_im = op.Scan(
        h0_re,
        h0_im,
        a_re,
        a_im,
        b_re,
        b_im,
        body=step,
        num_scan_inputs=4,
        scan_input_axes=[1, 1, 1, 1],
        scan_output_axes=[1, 1],
    )
    return h_re, h_im


@script(_domain, default_opset=op)
def _running_maximum(x: FLOAT) -> FLOAT:
    """The largest number so far along axis 1."""

    @graph()
    def step(before, x_t):  # type: ignore[no-untyped-def]
        now = op.Max(before, x_t)
        return now, op.Identity(now)

    first = op.Squeeze(op.Slice(x, [0], [1], [1]), [1])
    _last, largest = op.Scan(first, x, body=step, num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1])
    return largest


@script(_domain, default_opset=op)
def _matrix_scan(matrix: FLOAT, b: FLOAT, h0: FLOAT) -> FLOAT:
    """h_t = A h_{t-1} + b_t along axis 1."""
    transposed = op.Transpose(matrix, perm=[1, 0])

    @graph()
    def step(h_before, b_t):  # type: ignore[no-untyped-def]
        h_now = op.Add(op.MatMul(h_before, transposed), b_t)
        return h_now, op.Identity(h_now)

    _last, h = op.Scan(h0, b, body=step, num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1])
    return h


@script(_domain, default_opset=op)
def _delta_rule(q: FLOAT, k: FLOAT, v: FLOAT, a: FLOAT, b: FLOAT, h0: FLOAT) -> tuple[FLOAT, FLOAT]:
    """h = a_t h_{t-1}, h_t = h + b_t k_t^T (v_t - k_t h), y_t = q_t h_t along axis 1."""

    @graph()
    def step(h_before, q_t, k_t, v_t, a_t, b_t):  # type: ignore[no-untyped-def]
        decayed = op.Mul(op.Unsqueeze(a_t, [3]), h_before)
        error = op.Sub(op.Unsqueeze(v_t, [2]), op.MatMul(op.Unsqueeze(k_t, [2]), decayed))
        written = op.Mul(op.Unsqueeze(k_t, [3]), op.Mul(op.Unsqueeze(b_t, [3]), error))
        h_now = op.Add(decayed, written)
        return h_now, op.Squeeze(op.MatMul(op.Unsqueeze(q_t, [2]), h_now), [2])

    last, y = op.Scan(
        h0, q, k, v, a, b, body=step, num_scan_inputs=5, scan_input_axes=[1, 1, 1, 1, 1], scan_output_axes=[1]
    )
    return y, last


@script(_domain, default_opset=op)
def _generalised_delta_rule(
    q: FLOAT, k: FLOAT, v: FLOAT, a: FLOAT, read: FLOAT, write: FLOAT, h0: FLOAT
) -> tuple[FLOAT, FLOAT]:
    """h_t = a_t h_{t-1} + write_t^T (read_t h_{t-1}) + k_t^T v_t, y_t = q_t h_t along axis 1."""

    @graph()
    def step(h_before, q_t, k_t, v_t, a_t, read_t, write_t):  # type: ignore[no-untyped-def]
        moved = op.Mul(op.Unsqueeze(write_t, [3]), op.MatMul(op.Unsqueeze(read_t, [2]), h_before))
        written = op.Mul(op.Unsqueeze(k_t, [3]), op.Unsqueeze(v_t, [2]))
        h_now = op.Add(op.Add(op.Mul(op.Unsqueeze(a_t, [3]), h_before), moved), written)
        return h_now, op.Squeeze(op.MatMul(op.Unsqueeze(q_t, [2]), h_now), [2])

    last, y = op.Scan(
        h0, q, k, v, a, read, write, body=step, num_scan_inputs=6, scan_input_axes=[1, 1, 1, 1, 1, 1],
        scan_output_axes=[1],
    )  # fmt: skip
    return y, last


@script(_domain, default_opset=op)
def _slstm(
    projected: FLOAT, weights: FLOAT, c: FLOAT, n: FLOAT, m: FLOAT, h: FLOAT
) -> tuple[FLOAT, FLOAT, FLOAT, FLOAT, FLOAT]:
    """The steps of `recurra.ops.cells.slstm.slstm_sequence_reference`, by heads."""
    steps = op.Reshape(op.Transpose(projected, perm=[1, 3, 0, 2, 4]), [0, 0, 0, -1])
    c0, n0, h0 = op.Transpose(c, perm=[1, 0, 2]), op.Transpose(n, perm=[1, 0, 2]), op.Transpose(h, perm=[1, 0, 2])
    m0 = op.Where(op.Equal(n0, 0.0), -1e30, op.Transpose(m, perm=[1, 0, 2]))

    @graph()
    def step(c_before, n_before, m_before, h_before, inputs):  # type: ignore[no-untyped-def]
        z, i, f, o = op.Split(op.Add(inputs, op.MatMul(h_before, weights)), num_outputs=4, axis=-1)
        kept = op.Sub(m_before, op.Softplus(op.Neg(f)))  # log f + m
        m_now = op.Max(kept, i)
        forget, write = op.Exp(op.Sub(kept, m_now)), op.Exp(op.Sub(i, m_now))
        c_now = op.Add(op.Mul(forget, c_before), op.Mul(write, op.Tanh(z)))
        n_now = op.Add(op.Mul(forget, n_before), write)
        h_now = op.Div(op.Mul(op.Sigmoid(o), c_now), n_now)
        return c_now, n_now, m_now, h_now, op.Identity(h_now)

    c1, n1, m1, h1, y = op.Scan(c0, n0, m0, h0, steps, body=step, num_scan_inputs=1)
    return (
        op.Transpose(y, perm=[2, 0, 1, 3]),
        op.Transpose(c1, perm=[1, 0, 2]),
        op.Transpose(n1, perm=[1, 0, 2]),
        op.Transpose(m1, perm=[1, 0, 2]),
        op.Transpose(h1, perm=[1, 0, 2]),
    )


def _gru(x: FLOAT, h: FLOAT, weight_ih: FLOAT, weight_hh: FLOAT, bias_ih: FLOAT, bias_hh: FLOAT) -> tuple[FLOAT, FLOAT]:
    """ONNX's own operator, with the reset gate after the product; its gates are z, r, h, torch's are r, z, n."""
    ordered = []
    for rows in (weight_ih, weight_hh, bias_ih, bias_hh):
        r, z, n = op.Split(rows, num_outputs=3, axis=0)
        ordered.append(op.Unsqueeze(op.Concat(z, r, n, axis=0), [0]))
    of_x, of_h, *biases = ordered
    y, last = op.GRU(
        op.Transpose(x, perm=[1, 0, 2]),
        of_x,
        of_h,
        op.Concat(*biases, axis=1),
        None,
        op.Unsqueeze(h, [0]),
        hidden_size=int(h.shape[1]),
        linear_before_reset=1,
    )
    return op.Transpose(op.Squeeze(y, [1]), perm=[1, 0, 2]), op.Squeeze(last, [0])


def _cummax(x: FLOAT, dim: int) -> tuple[FLOAT, FLOAT]:
    if dim != 1:
        raise ValueError(f"a running maximum along dimension {dim} cannot be exported, only along time")
    largest = _running_maximum(x)
    return largest, largest  # the second stands for the places of the maxima, which no mixer reads


def _linear_scan(a: FLOAT, b: FLOAT, h0: FLOAT, reverse: bool, backend: str = "auto") -> FLOAT:
    if reverse:
        raise ValueError("a scan from the last step to the first cannot be exported")
    return _real_scan(a, b, h0)


_TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.cummax.default: _cummax,
    torch.ops.recurra.complex_scan.default: _complex_scan,
    torch.ops.recurra.delta_rule.default: _delta_rule,
    torch.ops.recurra.generalised_delta_rule.default: _generalised_delta_rule,
    torch.ops.recurra.gru_steps.default: _gru,
    torch.ops.recurra.linear_scan.default: _linear_scan,
    torch.ops.recurra.matrix_scan.default: _matrix_scan,
    torch.ops.recurra.slstm_steps.default: _slstm,
}
"""`custom_translation_table` of torch.onnx.export."""


_OnnxState = dict[str, np.ndarray[Any, Any]]
"""The tensors of a state by their input names."""


class OnnxModel:
    """A language model from an ONNX file; it needs no PyTorch to run.

    Args:
        source: a file that `sealed` made, which must have its digest; or the content of any.
        threads: number of threads for onnxruntime; all cores if None.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or not of this package.
    """

    def __init__(self, source: Path | bytes, *, threads: int | None = None) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        content = source if isinstance(source, bytes) else _read_sealed(source)
        self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self.metadata: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        if "recurra.state" not in self.metadata:
            raise ValueError(
                "the ONNX file has no metadata of this package; expected one that `recurra export onnx` wrote"
            )
        self._state = parse_json(self.metadata["recurra.state"], "the state in the ONNX file", kind=list)

    def start(self, batch: int = 1) -> _OnnxState:
        """Return the state of `batch` streams at their start."""
        return {f"state.{tensor['name']}": np.zeros((batch, *tensor["shape"]), np.float32) for tensor in self._state}

    def __call__(
        self, tokens: np.ndarray[Any, Any], state: _OnnxState | None = None
    ) -> tuple[np.ndarray[Any, Any], _OnnxState]:
        """Return the logits (B, L, V) after every token (B, L), continuing from `state`; None starts a stream.

        Raises:
            ValueError: there is no token; ONNX's recurrences need one.
        """
        if tokens.ndim != 2 or not tokens.shape[1]:
            raise ValueError(sentence("tokens", f"of shape {tokens.shape}", "(batch, steps) with at least one step"))
        state = self.start(len(tokens)) if state is None else state
        logits, *last = self._session.run(None, {"tokens": tokens, **state})
        return logits, {f"state.{tensor['name']}": part for tensor, part in zip(self._state, last)}


# --- the file, for any batch and length ---
#
#     inputs    tokens (batch, length) int64, and per state tensor  state.NAME       (batch, ...) float32
#     outputs   logits (batch, length, V),    and per state tensor  next_state.NAME  (batch, ...) float32
#
# A stream starts from zeros. Complex tensors have a last dimension of 2, real and imaginary part. The file's metadata
# say all that is needed to run it:
#
#     recurra.state       JSON: a list of {"name", "shape" (without the batch), "dtype", "complex"}
#     recurra.vocab_size  tokens that may come in
#     recurra.class, recurra.config, recurra.version   the model it was, its configuration as JSON, this package
#     recurra.tokenizer   JSON as the package tokenizers reads it, where the model has one
#     recurra.sha256      of all bytes before this entry, which is the last


LARGEST_DIFFERENCE = 1e-4
"""Largest difference of logits, as a share of the largest: rounding makes about 1e-6, 1e-5 in deep models."""
_LARGEST_FILE = 2**31 - 2**20
"""Bytes of weights that an ONNX file can hold beside its graph."""
_LENGTHS = ((1, 33), (3, 7))  # batch and length of the comparison; neither is what the graph was traced with


def to_onnx(model: LanguageModelShell, *, tokenizer: str | None = None) -> onnx.ModelProto:
    """Return a model as an ONNX graph with its metadata.

    Args:
        model: a language model on the CPU, in float32.
        tokenizer: JSON as the package tokenizers reads it, kept with the graph.
    """
    n_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if n_bytes > _LARGEST_FILE:
        raise ValueError(f"the weights are {n_bytes / 2**30:.1f} GiB; expected at most 2, which an ONNX file can hold")
    with tracing():
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
                    custom_translation_table=_TRANSLATIONS,
                    verbose=False,
                )
        except torch.onnx.OnnxExporterError as error:  # an operator of a mixer that is not of this package
            raise ValueError(f"the model cannot be written in ONNX: {error}") from error
    assert exported is not None
    graph = exported.model_proto
    tensors = [
        {"name": tensor.name, "shape": tensor.shape, "dtype": "float32", "complex": tensor.is_complex}
        for tensor in traced.state
    ]
    metadata = {
        "class": type(model).__name__,
        "config": json.dumps(asdict(model.config)),
        "version": recurra.__version__,
        "vocab_size": str(model.config.vocab_size),
        "state": json.dumps(tensors),
    }
    if tokenizer is not None:
        metadata["tokenizer"] = tokenizer
    for key, value in metadata.items():
        graph.metadata_props.add(key=f"recurra.{key}", value=value)
    return graph


def sealed(content: bytes) -> bytes:
    """Put the digest of a graph's bytes behind them, as an entry of its metadata: protobuf joins messages in a row."""
    return content + _seal(content)


def _seal(content: bytes | memoryview) -> bytes:
    entry = onnx.StringStringEntryProto(key="recurra.sha256", value=sha256(content).hexdigest())
    return onnx.ModelProto(metadata_props=[entry]).SerializeToString()


def _read_sealed(path: Path) -> bytes:
    content, n_bytes = path.read_bytes(), len(_seal(b""))
    if content[-n_bytes:] != _seal(memoryview(content)[:-n_bytes]):
        expected = "a file as `recurra export onnx` wrote it"
        raise ValueError(sentence(str(path), "damaged: its content does not match its digest", expected))
    return content


def to_int8(graph: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph whose matrices are kept as 8-bit integers, and whose input vectors are rounded to 8 bits.

    Of the 8 bits of a weight, 7 are used: on processors without VNNI instructions, onnxruntime adds two products of 8
    bits in 16, where they overflow in silence.
    """
    with tempfile.TemporaryDirectory() as folder, tracing():
        path = Path(folder) / "int8.onnx"
        quantize_dynamic(graph, path, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)
        return onnx.load(path)


@torch.inference_mode()
def largest_difference(model: LanguageModelShell, exported: OnnxModel) -> float:
    """Compare the logits of a file with those of its model: whole texts of two lengths, and one token at a time."""
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


@contextmanager
def tracing() -> Iterator[None]:
    """Silence what tracers say about missing packages and their own deprecated code, and let them trace faster."""
    loggers = [logging.getLogger(name) for name in (None, "torch.onnx._internal.exporter._registration")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        # looking up what was computed for other symbolic sizes takes longer than to compute it again
        with warnings.catch_warnings(), torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
