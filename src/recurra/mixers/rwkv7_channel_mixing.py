"""RWKV-7's channel mixing: a feed-forward network that sees two steps (Peng et al. 2025, arXiv 2503.14456)."""

import torch
from torch import Tensor, nn

from recurra.checks import require_at_least
from recurra.layers.convolution import with_previous
from recurra.layers.norms import at_least_float32
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.mixers.rwkv4_channel_mixing import RWKV4ChannelMixingState


@register_mixer("rwkv7-channel-mixing")
class RWKV7ChannelMixing(Mixer):
    """y_t = W_v max(W_k (x_t + mu * (x_{t-1} - x_t)), 0)^2

    mu starts as in the first published layer. A published block is `rwkv7` and then this mixer, with
    `d_channel_mixing` 0. The state is that of `rwkv4-channel-mixing`.

    Args:
        d_hidden: channels of the hidden layer; 4 * `d_model`, as published, if None.
    """

    skips_padding = True

    def __init__(self, d_model: int, *, d_hidden: int | None = None) -> None:
        d_hidden = 4 * d_model if d_hidden is None else d_hidden
        require_at_least(1, d_hidden=d_hidden)
        super().__init__(d_model, RWKV4ChannelMixingState, x=StateSpec((d_model,)))
        self.shift = nn.Parameter(1 - torch.arange(d_model) / d_model)
        self.key = nn.Linear(d_model, d_hidden, bias=False)
        self.output_projection = nn.Linear(d_hidden, d_model, bias=False)

    def mix(
        self, x: Tensor, state: RWKV4ChannelMixingState, mask: Tensor | None
    ) -> tuple[Tensor, RWKV4ChannelMixingState]:
        now, previous, last = with_previous(x, state.x, mask)
        k = self.key((now + at_least_float32(self.shift) * (previous - now)).to(x.dtype))
        return self.output_projection(torch.relu(k).square()), RWKV4ChannelMixingState(last)
