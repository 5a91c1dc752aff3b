"""Language models for other runtimes: torch.export programs here, ONNX files in `recurra.export.onnx_file`.

The latter, and `recurra.export.onnx_model`, which runs such files, need the extra `export`:
`pip install "recurra[export]"`.
"""

from recurra.export.exportable import require_exportable
from recurra.export.programs import StateTensor, StreamProgram, prefill_program, state_tensors, step_program, zero_state

__all__ = [
    "StateTensor",
    "StreamProgram",
    "prefill_program",
    "require_exportable",
    "state_tensors",
    "step_program",
    "zero_state",
]
