from recurra.decoding.linear import NUMBERS, DecodingLinear, pack_linear_layers
from recurra.decoding.memory import StepNotCompiled
from recurra.decoding.prepare import CompiledStep, StateShapeChanges, TracedStep, prepare_for_decoding

__all__ = [
    "NUMBERS",
    "CompiledStep",
    "DecodingLinear",
    "StateShapeChanges",
    "StepNotCompiled",
    "TracedStep",
    "pack_linear_layers",
    "prepare_for_decoding",
]
