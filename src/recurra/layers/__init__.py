"""Layers: modules `(x, state) -> (y, state)` over time, and the stateless parts around them."""

from recurra.layers.feed_forward import FeedForward
from recurra.layers.gate_loop import GateLoop, GateLoopState
from recurra.layers.mixers import create_mixer, list_mixers, register_mixer

__all__ = ["FeedForward", "GateLoop", "GateLoopState", "create_mixer", "list_mixers", "register_mixer"]
