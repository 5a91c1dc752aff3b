from recurra._choices import DTYPES
from recurra.decoding.linear import DecodingLinear
from recurra.decoding.memory import StepNotCompiled
from recurra.decoding.packing import pack_linear_layers
from recurra.decoding.steps import CompiledStep, StateShapeChanges, prepare

__all__ = [
    "DTYPES",
    "CompiledStep",
    "DecodingLinear",
    "StateShapeChanges",
    "StepNotCompiled",
    "pack_linear_layers",
    "prepare",
]
