"""RWKV-4's time mixing (Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", arXiv 2305.13048)."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recurra.checks import require_at_least
from recurra.layers.convolution import mixed, with_previous
from recurra.layers.norms import at_least_float32
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops.scan.operator import linear_scan
from recurra.ops.scan.reference import stabilisers
from recurra.state import last_step

_NEVER = -1e30  # log weight of a step that does not exist; finite, so that no difference is NaN


class RWKV4State(NamedTuple):
    """The average and the last input."""

    a: Float[Tensor, "B D"]
    """exp(-m) times the sum of weighted values."""
    b: Float[Tensor, "B D"]
    """exp(-m) times the sum of weights: 0 at the start of a stream, and about 1 or more afterwards."""
    m: Float[Tensor, "B D"]
    """The stabiliser: the largest log weight, 0 at the start of a stream."""
    x: Float[Tensor, "B d_model"]
    """The last step's input, for the token shift."""


@register_mixer("rwkv4")
class RWKV4(Mixer):
    """y_t = W_o (sigmoid(r_t) * wkv_t), wkv_t an average of the values so far in every channel  (Peng et al. (16)-(17))

        wkv_t = (a_{t-1} + exp(u + k_t) v_t) / (b_{t-1} + exp(u + k_t))
        a_t = exp(-w) a_{t-1} + exp(k_t) v_t,  b_t = exp(-w) b_{t-1} + exp(k_t)

    r, k and v are projections of mu * x_t + (1 - mu) * x_{t-1}, each with its own mu: the token shift  (Peng et al.
    (11)-(13)). w = exp(log_decay) > 0 is the decay of a channel, and u is a bonus for the current step.

    exp(k) can overflow, so the state has a exp(-m) and b exp(-m) with the stabiliser m_t = max(m_{t-1} - w, k_t). All
    m_t are known before the recurrence, which is then two linear scans with transitions in [0, 1]. No gradient flows
    through m_t: it cancels.

    Channel mixing, the other half of a published block, is the mixer `rwkv4-channel-mixing`. Our choice: decays, bonus
    and mu are initialised as in the first published layer, because a mixer does not know its depth.

    Args:
        d_wkv: channels of the recurrence, D; `d_model` if None.
    """

    skips_padding = True

    def __init__(self, d_model: int, *, d_wkv: int | None = None) -> None:
        d_wkv = d_model if d_wkv is None else d_wkv
        require_at_least(1, d_wkv=d_wkv)
        channels = StateSpec((d_wkv,))
        super().__init__(d_model, RWKV4State, a=channels, b=channels, m=channels, x=StateSpec((d_model,)))
        share = torch.arange(d_model) / d_model
        self.mix_key, self.mix_value = nn.Parameter(share.clone()), nn.Parameter(share.clone())
        self.mix_receptance = nn.Parameter(share.sqrt())
        self.key, self.value, self.receptance = (nn.Linear(d_model, d_wkv, bias=False) for _ in range(3))
        self.log_decay = nn.Parameter(8 * (torch.arange(d_wkv) / max(d_wkv - 1, 1)) ** 0.7 - 5)
        self.bonus = nn.Parameter(((torch.arange(d_wkv) + 1) % 3 - 1) * 0.5 + math.log(0.3))
        self.output_projection = nn.Linear(d_wkv, d_model, bias=False)

    def transition_parameters(self) -> set[nn.Parameter]:
        return {self.log_decay, self.bonus}

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """Return exp(-w) and its phase, which is 0, for every channel: the same at every step."""
        a = torch.exp(-torch.exp(at_least_float32(self.log_decay))).expand(*x.shape[:2], -1)
        return a, torch.zeros_like(a)

    def mix(self, x: Tensor, state: RWKV4State, mask: Tensor | None) -> tuple[Tensor, RWKV4State]:
        now, previous, last = with_previous(x, state.x, mask)
        shares = ((self.key, self.mix_key), (self.value, self.mix_value), (self.receptance, self.mix_receptance))
        k, v, r = (at_least_float32(linear(mixed(now, previous, share).to(x.dtype))) for linear, share in shares)
        wkv, (a, b, m) = self._average(k, v, state, mask)
        return self.output_projection((torch.sigmoid(r) * wkv).to(x.dtype)), RWKV4State(a, b, m, last)

    def _average(
        self, k: Float[Tensor, "B L D"], v: Float[Tensor, "B L D"], state: RWKV4State, mask: Tensor | None
    ) -> tuple[Float[Tensor, "B L D"], tuple[Tensor, Tensor, Tensor]]:
        """wkv_t of every step, and a, b and m after the last one."""
        decay = -torch.exp(at_least_float32(self.log_decay))
        log_f = decay.expand(1, *k.shape[1:])
        positions = torch.arange(1 - k.shape[1], 1, device=k.device)[None]  # from the last step: its m keeps its digits
        n_steps = 1 - positions[:, :1]
        if mask is not None:
            n_steps = mask.sum(1, keepdim=True)
            log_f, positions = mask_fill(log_f.expand_as(k), mask, 0), mask.cumsum(1) - n_steps
            k = k.masked_fill(~mask[..., None], _NEVER)
        started = (state.b.detach() * -_NEVER).clamp(max=1)  # 0 or 1, without a comparison: compiled steps have none
        start = started * state.m.detach() + (1 - started) * _NEVER
        constant = decay.detach()
        m = stabilisers(constant * positions[..., None], k.detach(), start + constant * n_steps)
        before = _shifted(start, m)
        f, i = torch.exp(log_f + before - m), mask_fill(torch.exp(k - m), mask, 0)
        a, b = linear_scan(f, i * v, state.a), linear_scan(f, i, state.b)
        own = at_least_float32(self.bonus) + k
        unit = torch.maximum(before, own.detach())
        kept, added = torch.exp(before - unit), torch.exp(own - unit)
        numerator = kept * _shifted(state.a, a) + added * v
        denominator = kept * _shifted(state.b, b) + added
        last = m[:, -1].clone()
        if mask is not None:
            last = torch.where(mask.any(1)[:, None], last, state.m)
        return numerator / denominator, (last_step(a, state.a), last_step(b, state.b), last)


def _shifted(start: Float[Tensor, "B D"], h: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
    """What stood before each step."""
    return torch.cat([start[:, None], h], 1)[:, :-1]
