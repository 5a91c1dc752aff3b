"""Layers: modules `(x, state) -> (y, state)` over time, and the stateless parts around them."""

from recurra.layers.adaptive_embedding import AdaptiveEmbedding
from recurra.layers.adaptive_softmax import AdaptiveSoftmax
from recurra.layers.dropout import LockedDropout, WordDropout
from recurra.layers.feed_forward import FeedForward
from recurra.layers.gate_loop import GateLoop, GateLoopState
from recurra.layers.gate_loop_attention import GateLoopAttention, GateLoopAttentionState
from recurra.layers.gru import GRU, GRUState
from recurra.layers.linear_attention import LinearAttention, LinearAttentionState
from recurra.layers.linear_rnn import LinearRNN, LinearRNNState
from recurra.layers.lru import LRU, LRUState
from recurra.layers.mixers import create_mixer, list_mixers, register_mixer
from recurra.layers.relative_attention import RelativeAttention, RelativeAttentionState
from recurra.layers.retention import Retention, RetentionState
from recurra.layers.rnn import RNN, RNNState
from recurra.layers.rotary_attention import RotaryAttention, RotaryAttentionState
from recurra.layers.s4d import S4D, S4DState
from recurra.layers.s5 import S5, S5State

__all__ = [
    "GRU",
    "LRU",
    "RNN",
    "S4D",
    "S5",
    "AdaptiveEmbedding",
    "AdaptiveSoftmax",
    "FeedForward",
    "GRUState",
    "GateLoop",
    "GateLoopAttention",
    "GateLoopAttentionState",
    "GateLoopState",
    "LRUState",
    "LinearAttention",
    "LinearAttentionState",
    "LinearRNN",
    "LinearRNNState",
    "LockedDropout",
    "RNNState",
    "RelativeAttention",
    "RelativeAttentionState",
    "Retention",
    "RetentionState",
    "RotaryAttention",
    "RotaryAttentionState",
    "S4DState",
    "S5State",
    "WordDropout",
    "create_mixer",
    "list_mixers",
    "register_mixer",
]
