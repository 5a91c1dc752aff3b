"""Models made ready to run one step at a time on a CPU: the same modules, weights packed for reading them
once, and single steps recorded."""

from recurra.decoding.compiled_step import CompiledStep
from recurra.decoding.pack import pack_linear_layers
from recurra.decoding.packed_linear import NUMBERS, PackedLinear
from recurra.decoding.prepare import prepare_for_decoding
from recurra.decoding.recorded_step import RecordedStep, StepNotSteady
from recurra.decoding.step_memory import StepNotCompiled

__all__ = [
    "NUMBERS",
    "CompiledStep",
    "PackedLinear",
    "RecordedStep",
    "StepNotCompiled",
    "StepNotSteady",
    "pack_linear_layers",
    "prepare_for_decoding",
]
