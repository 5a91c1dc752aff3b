"""Models made ready to run one step at a time on a CPU: the same modules, weights packed for reading them
once, and single steps recorded."""

from recurra.decoding.pack import pack_linear_layers
from recurra.decoding.packed_linear import NUMBERS, PackedLinear
from recurra.decoding.recorded_step import RecordedStep

__all__ = ["NUMBERS", "PackedLinear", "RecordedStep", "pack_linear_layers"]
