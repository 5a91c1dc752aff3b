"""An ONNX file of this package in onnxruntime, under the one contract: `logits, state = model(tokens, state)`."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from recurra.files.reading import parse_json

OnnxState = dict[str, np.ndarray[Any, Any]]
"""The tensors of a state by their input names."""


class OnnxModel:
    """A language model from an ONNX file; it needs no PyTorch to run.

    Args:
        source: the file, or its content.
        threads: number of threads for onnxruntime; all cores if None.

    Raises:
        ValueError: the file was not written by this package.
    """

    def __init__(self, source: Path | bytes, *, threads: int | None = None) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        self.metadata: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        if "recurra.state" not in self.metadata:
            raise ValueError(
                "the ONNX file has no metadata of this package; expected one that `recurra export onnx` wrote"
            )
        self._state = parse_json(self.metadata["recurra.state"], "the state in the ONNX file", kind=list)

    def start(self, batch: int = 1) -> OnnxState:
        """Return the state of `batch` streams at their start."""
        return {f"state.{tensor['name']}": np.zeros((batch, *tensor["shape"]), np.float32) for tensor in self._state}

    def __call__(
        self, tokens: np.ndarray[Any, Any], state: OnnxState | None = None
    ) -> tuple[np.ndarray[Any, Any], OnnxState]:
        """Return the logits (B, L, V) after every token (B, L), continuing from `state`; None starts a stream."""
        state = self.start(len(tokens)) if state is None else state
        logits, *last = self._session.run(None, {"tokens": tokens, **state})
        return logits, {f"state.{tensor['name']}": part for tensor, part in zip(self._state, last)}
