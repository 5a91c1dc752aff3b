from recurra.mixers.base import Dim, Mixer, StateSpec, create_mixer, list_mixers, register_mixer
from recurra.mixers.delta_net import DeltaNet, DeltaNetState
from recurra.mixers.gated_attention import GatedAttention
from recurra.mixers.gated_delta_net import GatedDeltaNet
from recurra.mixers.gateloop import GateLoop, GateLoopState
from recurra.mixers.gateloop_attention import GateLoopAttention, GateLoopAttentionState
from recurra.mixers.gla import GatedLinearAttention, GatedLinearAttentionState
from recurra.mixers.gru import GRU, GRUState
from recurra.mixers.h3 import H3, H3State
from recurra.mixers.hgrn2 import HGRN2, HGRN2State
from recurra.mixers.hyena import Hyena, HyenaState
from recurra.mixers.kda import KimiDeltaAttention
from recurra.mixers.lightning_attention import LightningAttention, LightningAttentionState
from recurra.mixers.linear_attention import LinearAttention, LinearAttentionState
from recurra.mixers.linear_rnn import LinearRNN, LinearRNNState
from recurra.mixers.lru import LRU, LRUState
from recurra.mixers.mamba import Mamba, MambaState
from recurra.mixers.mamba2 import Mamba2, Mamba2State
from recurra.mixers.mamba2_attention import Mamba2Attention, Mamba2AttentionState
from recurra.mixers.mamba3 import Mamba3, Mamba3State
from recurra.mixers.min_gru import MinGRU, MinGRUState
from recurra.mixers.min_lstm import MinLSTM, MinLSTMState
from recurra.mixers.mla import MultiHeadLatentAttention, MultiHeadLatentAttentionState
from recurra.mixers.mlstm import MLSTM, MLSTMState
from recurra.mixers.performer import Performer, PerformerState
from recurra.mixers.reformer import Reformer, ReformerState
from recurra.mixers.relative_attention import RelativeAttention, RelativeAttentionState
from recurra.mixers.retnet import Retention, RetentionState
from recurra.mixers.rg_lru import RGLRU, RGLRUState
from recurra.mixers.rnn import RNN, RNNState
from recurra.mixers.rotary_attention import RotaryAttention, RotaryAttentionState
from recurra.mixers.rwkv4 import RWKV4, RWKV4State
from recurra.mixers.rwkv4_channel_mixing import RWKV4ChannelMixing, RWKV4ChannelMixingState
from recurra.mixers.rwkv7 import RWKV7, RWKV7State
from recurra.mixers.rwkv7_channel_mixing import RWKV7ChannelMixing
from recurra.mixers.s4d import S4D, S4DState
from recurra.mixers.s5 import S5, S5State
from recurra.mixers.s5_hyena import S5Hyena, S5HyenaState
from recurra.mixers.short_conv import GatedShortConvolution, GatedShortConvolutionState
from recurra.mixers.slstm import SLSTM, SLSTMState
from recurra.mixers.zamba2 import Zamba2

__all__ = [
    "GRU",
    "H3",
    "HGRN2",
    "LRU",
    "MLSTM",
    "RGLRU",
    "RNN",
    "RWKV4",
    "RWKV7",
    "S4D",
    "S5",
    "SLSTM",
    "DeltaNet",
    "DeltaNetState",
    "Dim",
    "GRUState",
    "GateLoop",
    "GateLoopAttention",
    "GateLoopAttentionState",
    "GateLoopState",
    "GatedAttention",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedLinearAttentionState",
    "GatedShortConvolution",
    "GatedShortConvolutionState",
    "H3State",
    "HGRN2State",
    "Hyena",
    "HyenaState",
    "KimiDeltaAttention",
    "LRUState",
    "LightningAttention",
    "LightningAttentionState",
    "LinearAttention",
    "LinearAttentionState",
    "LinearRNN",
    "LinearRNNState",
    "MLSTMState",
    "Mamba",
    "Mamba2",
    "Mamba2Attention",
    "Mamba2AttentionState",
    "Mamba2State",
    "Mamba3",
    "Mamba3State",
    "MambaState",
    "MinGRU",
    "MinGRUState",
    "MinLSTM",
    "MinLSTMState",
    "Mixer",
    "MultiHeadLatentAttention",
    "MultiHeadLatentAttentionState",
    "Performer",
    "PerformerState",
    "RGLRUState",
    "RNNState",
    "RWKV4ChannelMixing",
    "RWKV4ChannelMixingState",
    "RWKV4State",
    "RWKV7ChannelMixing",
    "RWKV7State",
    "Reformer",
    "ReformerState",
    "RelativeAttention",
    "RelativeAttentionState",
    "Retention",
    "RetentionState",
    "RotaryAttention",
    "RotaryAttentionState",
    "S4DState",
    "S5Hyena",
    "S5HyenaState",
    "S5State",
    "SLSTMState",
    "StateSpec",
    "Zamba2",
    "create_mixer",
    "list_mixers",
    "register_mixer",
]
