"""Multi-scale retention, RetNet's time-mixing layer (Sun et al., arXiv 2307.08621, sections 2.1 and 2.2)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from recurra.gateloop import gate_loop
from recurra.layers.options import check_heads
from recurra.layers.precision import at_least_float32
from recurra.layers.rotation import phases, rotate
from recurra.lengths.padded import blank, check_lengths, in_rows, keep
from recurra.mixers.registry import register_mixer


class RetentionState(NamedTuple):
    """h_n = sum_{m<=n} gamma^(n-m) rotate(k_m, (m - n) theta)^T v_m: keys are turned as the newest step n sees them.

    No position is kept, so nothing grows with the stream. float32 whatever the precision of the layer's inputs
    (float64 for a float64 layer).
    """

    h: Float[Tensor, "B H d_k d_v"]


@register_mixer("retnet")
class Retention(nn.Module):
    """y_n = (swish(W_g x_n) * norm(q_n sum_{m<=n} a^(n-m) k_m^T v_m)) W_o with a = gamma exp(i theta) (GateLoop (11)).

    gamma_h = 1 - 2^(-5-h) in head h = 0, 1, ...; theta are the fixed phases of xPos. q, k, v = projections of x, k
    divided by sqrt(d_k). The norm is a group norm of each step, one group a head.

    The modulus of a is one number a head: it alone is the gate of the recurrence, and real. Its phase is put into q and
    k, which are rotated by their positions relative to the last step of the call; between two calls the state is turned
    on. So the recurrence is as good as a complex gate on every key channel, and its products of matrices stay real.

    The paper has three normalisations of the scores, which keep numbers small in half precision. We keep the first,
    1 / sqrt(d_k). The two others divide all that a head gives out at a step by one positive number, the square root of
    the sum of its decays or the sum of its scores where it is above 1. The group norm takes such a factor out again,
    but for its epsilon, and sums here are in float32, so they are left out: they would need a running sum of their own
    in the state. The group norm has no scale and shift, and the projections no biases, as in the published code.

    Args:
        d_model: channels of x and y.
        d_qk: channels of queries and keys over all heads; `d_model` when None.
        d_v: channels of the values over all heads; twice `d_model`, as published, when None.
        n_heads: heads; published models have d_qk / 256. More than 19 are no use: in float32 their gamma is 1.

    Raises:
        ValueError: the heads do not divide the channels, a head has an odd number of key channels or only one for
            values.
    """

    def __init__(self, d_model: int, *, d_qk: int | None = None, d_v: int | None = None, n_heads: int = 4) -> None:
        super().__init__()
        self.d_qk = d_model if d_qk is None else d_qk
        self.d_v = 2 * d_model if d_v is None else d_v
        self.n_heads = n_heads
        check_heads(d_model, self.d_qk, self.d_v, n_heads)
        self.d_k = self.d_qk // n_heads
        if self.d_k % 2:
            raise ValueError(f"a head has {self.d_k} key channels; expected an even number, for they turn two by two")
        if self.d_v == n_heads:
            raise ValueError(f"d_v is {self.d_v}, one channel a head; the group norm needs at least 2")
        self.qkvg = nn.Linear(d_model, 2 * self.d_qk + 2 * self.d_v, bias=False)
        self.output_projection = nn.Linear(self.d_v, d_model, bias=False)

    def forward(
        self,
        x: Float[Tensor, "B L d_model"],
        state: RetentionState | None = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
    ) -> tuple[Float[Tensor, "B L d_model"], RetentionState]:
        """Mix `x` along time, going on from `state`; None is the start of a stream.

        `mask` and `cu_seqlens` are those of `recurra.lengths.padded`.

        Raises:
            TypeError, ValueError: the mask or the borders do not fit x, or both are given.
        """
        if cu_seqlens is not None:
            return in_rows(self, x, state, cu_seqlens=cu_seqlens, mask=mask)
        check_lengths(x, mask, None)
        x = blank(x, mask)
        *qkv, gate = self.qkvg(x).split([self.d_qk, self.d_qk, self.d_v, self.d_v], -1)
        q, k, v = (at_least_float32(part).unflatten(-1, (self.n_heads, -1)) for part in qkv)
        positions, n_steps = self._positions(x, mask)
        angles = phases(positions, self.d_k)[..., None, :]
        k = blank(rotate(k * self.d_k**-0.5, angles), mask)
        h = None if state is None else self._turned_on(state.h, n_steps)
        with torch.autocast(x.device.type, enabled=False):  # its matrix products would round sums to bfloat16
            y, h = gate_loop(rotate(q, angles), k, v, keep(self._decay(v), mask), state=h)
        y = functional.layer_norm(y, y.shape[-1:])  # of a head's channels: the group norm of a step
        y = (y.flatten(-2) * functional.silu(gate)).to(x.dtype)
        return blank(self.output_projection(y), mask), RetentionState(h)

    def _positions(self, x: Tensor, mask: Tensor | None) -> tuple[Int[Tensor, "#B L"], Int[Tensor, " #B"]]:
        """Minus the steps of x that come after each, and the steps of every row: those that count."""
        if mask is None:
            n_steps = torch.full((1,), x.shape[1], device=x.device)
            return torch.arange(1 - x.shape[1], 1, device=x.device)[None], n_steps
        return mask.cumsum(1) - mask.sum(1, keepdim=True), mask.sum(1)

    def _turned_on(self, h: Tensor, n_steps: Int[Tensor, " #B"]) -> Tensor:
        """The state as it is seen `n_steps` later, but for its decay."""
        angles = phases(-n_steps, self.d_k)[:, None, None]
        return rotate(h.transpose(-1, -2), angles).transpose(-1, -2)

    def _decay(self, v: Tensor) -> Tensor:
        """gamma of every step and head, (B, L, H, 1)."""
        exponents = -5.0 - torch.arange(self.n_heads, dtype=v.dtype, device=v.device)
        return (1.0 - torch.exp2(exponents))[:, None].expand(*v.shape[:3], 1)
