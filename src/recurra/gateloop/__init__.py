"""The GateLoop operator, a linear recurrence with data-controlled transitions, in all its modes."""

from recurra.gateloop.fused import Planes
from recurra.gateloop.operator import MODES, gate_loop, gate_loop_real_part
from recurra.gateloop.softmax import softmax_attention

__all__ = ["MODES", "Planes", "gate_loop", "gate_loop_real_part", "softmax_attention"]
