"""The GateLoop operator: linear recurrence with a transition that the data control, in all its modes."""

from recurra.gate_loop.fused import Planes
from recurra.gate_loop.operator import MODES, gate_loop, gate_loop_real_part
from recurra.gate_loop.softmax import softmax_attention

__all__ = ["MODES", "Planes", "gate_loop", "gate_loop_real_part", "softmax_attention"]
