from recurra.convert.export.programs import (
    StateTensor,
    StreamProgram,
    prefill_program,
    require_exportable,
    state_tensors,
    step_program,
    step_to_executorch,
    zero_state,
)

__all__ = [
    "StateTensor",
    "StreamProgram",
    "prefill_program",
    "require_exportable",
    "state_tensors",
    "step_program",
    "step_to_executorch",
    "zero_state",
]
