"""Models made ready to run one step at a time on a CPU: the same modules, with weights packed for reading them once."""

from recurra.decoding.pack import pack_linear_layers
from recurra.decoding.packed_linear import NUMBERS, PackedLinear

__all__ = ["NUMBERS", "PackedLinear", "pack_linear_layers"]
