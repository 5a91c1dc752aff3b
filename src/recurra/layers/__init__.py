"""Layers: modules `(x, state) -> (y, state)` over time, and the stateless parts around them."""

from recurra.layers.adaptive_embedding import AdaptiveEmbedding
from recurra.layers.adaptive_softmax import AdaptiveSoftmax
from recurra.layers.dropout import LockedDropout, WordDropout
from recurra.layers.feed_forward import FeedForward
from recurra.layers.gate_loop import GateLoop, GateLoopState
from recurra.layers.mixers import create_mixer, list_mixers, register_mixer
from recurra.layers.relative_attention import RelativeAttention, RelativeAttentionState
from recurra.layers.rnn import RNN, RNNState

__all__ = [
    "RNN",
    "AdaptiveEmbedding",
    "AdaptiveSoftmax",
    "FeedForward",
    "GateLoop",
    "GateLoopState",
    "LockedDropout",
    "RNNState",
    "RelativeAttention",
    "RelativeAttentionState",
    "WordDropout",
    "create_mixer",
    "list_mixers",
    "register_mixer",
]
