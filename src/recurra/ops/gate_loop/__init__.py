"""The GateLoop operator, a linear recurrence with data-controlled transitions, in all its modes."""

from recurra.ops.gate_loop.fused import Planes
from recurra.ops.gate_loop.operator import Mode, gate_loop, gate_loop_real_part
from recurra.ops.gate_loop.reference import softmax_attention

__all__ = ["Mode", "Planes", "gate_loop", "gate_loop_real_part", "softmax_attention"]
