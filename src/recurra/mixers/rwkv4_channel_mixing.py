"""RWKV-4's channel mixing: a feed-forward network that sees two steps (Peng et al. 2023, arXiv 2305.13048)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require_at_least
from recurra.layers.convolution import mixed, with_previous
from recurra.mixers.base import Mixer, StateSpec, register_mixer


class RWKV4ChannelMixingState(NamedTuple):
    """The last step's input."""

    x: Float[Tensor, "B d_model"]


@register_mixer("rwkv4-channel-mixing")
class RWKV4ChannelMixing(Mixer):
    """y_t = sigmoid(r_t) * W_v max(k_t, 0)^2  (Peng et al. (18))

    r and k are projections of mu * x_t + (1 - mu) * x_{t-1}, each with its own mu, initialised as in the first
    published layer  (Peng et al. (14)-(15)). A published block is `rwkv4` followed by this mixer, with
    `d_channel_mixing` 0.

    Args:
        d_hidden: channels of k; 4 * `d_model`, as published, if None.
    """

    skips_padding = True

    def __init__(self, d_model: int, *, d_hidden: int | None = None) -> None:
        d_hidden = 4 * d_model if d_hidden is None else d_hidden
        require_at_least(1, d_hidden=d_hidden)
        super().__init__(d_model, RWKV4ChannelMixingState, x=StateSpec((d_model,)))
        share = torch.arange(d_model) / d_model
        self.mix_key, self.mix_receptance = nn.Parameter(share.clone()), nn.Parameter(share.clone())
        self.key = nn.Linear(d_model, d_hidden, bias=False)
        self.receptance = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_hidden, d_model, bias=False)

    def mix(
        self, x: Tensor, state: RWKV4ChannelMixingState, mask: Tensor | None
    ) -> tuple[Tensor, RWKV4ChannelMixingState]:
        now, previous, last = with_previous(x, state.x, mask)
        k, r = (
            linear(mixed(now, previous, share).to(x.dtype))
            for linear, share in ((self.key, self.mix_key), (self.receptance, self.mix_receptance))
        )
        y = torch.sigmoid(r) * self.value(torch.relu(k).square())
        return y.to(x.dtype), RWKV4ChannelMixingState(last)
