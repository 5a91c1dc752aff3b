"""Models prepared to run one step at a time on a CPU: the same modules, weights laid out to be read once a step, and
single steps compiled or recorded."""

from recurra.decoding.compiled_step import CompiledStep
from recurra.decoding.lay_out import lay_out_linear_layers
from recurra.decoding.linear import NUMBERS, DecodingLinear
from recurra.decoding.prepare import prepare_for_decoding
from recurra.decoding.recorded_step import RecordedStep, StepNotSteady
from recurra.decoding.step_memory import StepNotCompiled

__all__ = [
    "NUMBERS",
    "CompiledStep",
    "DecodingLinear",
    "RecordedStep",
    "StepNotCompiled",
    "StepNotSteady",
    "lay_out_linear_layers",
    "prepare_for_decoding",
]
