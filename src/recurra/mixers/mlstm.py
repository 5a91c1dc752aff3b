"""The mLSTM: a matrix memory with exponential gating (Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory", arXiv
2405.04517, section 2.3), in the layer of the large models (Beck et al. 2025, arXiv 2503.13427).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require, require_heads
from recurra.layers.norms import at_least_float32
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops.gate_loop.operator import gate_loop
from recurra.ops.scan.reference import stabilisers

_CAP = 15.0  # of the gates' pre-activations, as published
_EPSILON = 1e-6  # as in the published code
_NEVER = -1e30  # an input gate at padding; finite, so that no difference is NaN


class MLSTMState(NamedTuple):
    """The memory and its stabiliser."""

    h: Float[Tensor, "B H d_k columns"]
    """exp(-m) C: the memory C of d_k x d_v and, as the last column, the normaliser n, both scaled by the stabiliser."""
    m: Float[Tensor, "B H"]
    """The stabiliser: C would overflow without it. It starts at 0."""


@register_mixer("mlstm")
class MLSTM(Mixer):
    """y_t = W_y (sigmoid(W_o x_t) * norm(h_t)), h_t = q_t C_t / max(|q_t . n_t|, 1)  (Beck et al. (19)-(27))

        C_t = f_t C_{t-1} + i_t k_t^T v_t,  n_t = f_t n_{t-1} + i_t k_t,  f_t = sigmoid(.),  i_t = exp(.)

    Of the published blocks, this is only the 7B model's (transformers' xLSTM). It has no convolution, skip and
    up-projection, unlike the block for smaller models in github.com/NX-AI/xlstm.

    q, k, v = projections of x, q divided by sqrt(d_k). The gates are one number per head, and their pre-activations are
    capped: 15 tanh(. / 15). The state has C exp(-m) and n exp(-m), where n is one more column of C, with a stabiliser
    m_t = max(log f_t + m_{t-1}, log i_t), as published; h_t depends on it only through the published epsilon.

    With F_t = log f_1 + ... + log f_t, m_t = F_t + max(m_0, log i_s - F_s for s <= t): all m_t are known before the
    recurrence, which is then GateLoop's, with a transition exp(log f_t + m_{t-1} - m_t) in [0, 1] for each head. No
    gradient flows through m_t: it cancels.

    It is initialised like that model: the gates ignore x, with biases of -10 (input gates) and 3 to 6 (forget gates).
    The norm is a layer norm of each head with a scale for each channel.

    Args:
        d_qk: channels of queries and keys over all heads; half of `d_model`, as published, if None.
        d_v: channels of the values over all heads; `d_model` if None.
        n_heads: heads.
    """

    skips_padding = True

    def __init__(self, d_model: int, *, d_qk: int | None = None, d_v: int | None = None, n_heads: int = 8) -> None:
        d_qk, d_v = d_model // 2 if d_qk is None else d_qk, d_model if d_v is None else d_v
        require_heads(n_heads, d_qk=d_qk, d_v=d_v)
        require(d_v > n_heads, "d_v", d_v, f"at least 2 channels a head for the layer norm, {2 * n_heads} in all")
        memory = StateSpec((n_heads, d_qk // n_heads, d_v // n_heads + 1))
        super().__init__(d_model, MLSTMState, h=memory, m=StateSpec((n_heads,)))
        self.d_qk, self.d_v, self.n_heads = d_qk, d_v, n_heads
        self.qkvo = nn.Linear(d_model, 2 * d_qk + 2 * d_v, bias=False)
        self.gates = nn.Linear(d_model, 2 * n_heads)  # input gates, forget gates
        self.norm_weight = nn.Parameter(torch.ones(d_v))
        self.output_projection = nn.Linear(d_v, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the gates as published. Call this again after re-initialising the weights."""
        nn.init.zeros_(self.gates.weight)
        self.gates.bias.copy_(torch.cat([torch.full((self.n_heads,), -10.0), torch.linspace(3.0, 6.0, self.n_heads)]))

    def transition(self, x: Float[Tensor, "B L d_model"]) -> tuple[Float[Tensor, "B L H"], Float[Tensor, "B L H"]]:
        """Return the forget gate and its phase, which is 0, for every head."""
        f = torch.sigmoid(self._capped_gates(x)[1])
        return f, torch.zeros_like(f)

    def mix(self, x: Tensor, state: MLSTMState, mask: Tensor | None) -> tuple[Tensor, MLSTMState]:
        *qkv, o = self.qkvo(x).split([self.d_qk, self.d_qk, self.d_v, self.d_v], -1)
        q, k, v = (at_least_float32(part).unflatten(-1, (self.n_heads, -1)) for part in qkv)
        log_i, forget = self._capped_gates(x)
        log_f = mask_fill(functional.logsigmoid(forget), mask, 0)
        if mask is not None:
            log_i = log_i.masked_fill(~mask[..., None], _NEVER)
        m = stabilisers(log_f.detach().cumsum(1), log_i.detach(), state.m.detach())
        before = torch.cat([state.m[:, None], m], 1)[:, :-1]
        f, i = torch.exp(log_f + before - m)[..., None], torch.exp(log_i - m)[..., None]
        y, h = gate_loop(q * q.shape[-1] ** -0.5, i * k, functional.pad(v, (0, 1), value=1.0), f, state=state.h)
        y = y[..., :-1] / (torch.maximum(y[..., -1:].abs(), torch.exp(-m)[..., None]) + _EPSILON)
        y = functional.layer_norm(y, y.shape[-1:], eps=_EPSILON).flatten(-2) * self.norm_weight
        last = MLSTMState(h, m[:, -1].clone())
        if mask is not None:  # a stream without a step: the gradient too is that of an unchanged state
            has_steps = mask.any(1)[:, None]
            h = torch.where(has_steps[..., None, None], last.h, state.h)
            last = MLSTMState(h, torch.where(has_steps, last.m, state.m))
        return self.output_projection((torch.sigmoid(o) * y).to(x.dtype)), last

    def _capped_gates(self, x: Float[Tensor, "B L d_model"]) -> tuple[Tensor, Tensor]:
        """Pre-activations of the input gates and the forget gates."""
        log_i, forget = (_CAP * torch.tanh(at_least_float32(self.gates(x)) / _CAP)).chunk(2, -1)
        return log_i, forget
