"""The GateLoop layer: data-controlled linear recurrence as a time-mixing layer (GateLoop section 4, App. C)."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn

from recurra.gateloop import Planes, gate_loop_real_part
from recurra.gateloop.polar import polar_planes
from recurra.layers.options import check_heads, choose
from recurra.layers.output_gate import NoOutputGate, SiLUOutputGate
from recurra.layers.transition import MAGNITUDE_ACTIVATIONS, PHASE_ACTIVATIONS, TRANSITIONS, ring_of
from recurra.lengths.padded import blank, check_lengths, in_rows, keep
from recurra.mixers.registry import register_mixer


class GateLoopState(NamedTuple):
    """The hidden state h_n, complex64 whatever the precision of the layer's inputs (complex128 for a float64 layer)."""

    h: Complex[Tensor, "B H d_k d_v"]


@register_mixer("gateloop")
class GateLoop(nn.Module):
    """y_n = W_o Re(q_n h_n), h_n = h_{n-1} a_n + k_n^T v_n, with q, k, v, a_n from x_n (GateLoop (7)-(8), (24)-(25)).

    Args:
        d_model: channels of x and y.
        d_qk: channels of queries, keys and transitions over all heads; `d_model` when None.
        d_v: channels of the values over all heads; `d_model` when None.
        n_heads: heads; `d_qk` when None, the max-headed case d_h = 1 that the paper trains.
        transition: "data", controlled by the input, or "fixed", one learned a per channel; nothing else changes.
        magnitude_activation: f in (25), "sigmoid" or LRU's "stable_exponential".
        phase_activation: g in (25), "identity".
        ring: where the transitions start, entries of `recurra.layers.transition.Ring`; None leaves it to their weights.
        output_gate: multiply Re(q_n h_n) by SiLU(W_g x_n) before the output projection (ours; off in the paper).

    Raises:
        ValueError: an option has a value that does not exist, or the heads do not divide the channels.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_qk: int | None = None,
        d_v: int | None = None,
        n_heads: int | None = None,
        transition: str = "data",
        magnitude_activation: str = "sigmoid",
        phase_activation: str = "identity",
        ring: Mapping[str, float] | None = None,
        output_gate: bool = False,
    ) -> None:
        super().__init__()
        self.d_qk = d_model if d_qk is None else d_qk
        self.d_v = d_model if d_v is None else d_v
        self.n_heads = self.d_qk if n_heads is None else n_heads
        check_heads(d_model, self.d_qk, self.d_v, self.n_heads)
        self.qkv = nn.Linear(d_model, 2 * self.d_qk + self.d_v)
        self.transition = choose("transition", TRANSITIONS, transition)(
            d_model,
            self.d_qk,
            choose("magnitude_activation", MAGNITUDE_ACTIVATIONS, magnitude_activation),
            choose("phase_activation", PHASE_ACTIVATIONS, phase_activation),
            ring_of(ring),
        )
        self.output_gate = (SiLUOutputGate if output_gate else NoOutputGate)(d_model, self.d_v)
        self.output_projection = nn.Linear(self.d_v, d_model)

    def transition_parameters(self) -> set[nn.Parameter]:
        """The parameters that make a_n: they may want a learning rate of their own and no weight decay (Table 4)."""
        return set(self.transition.parameters())

    def forward(
        self,
        x: Float[Tensor, "B L d_model"],
        state: GateLoopState | None = None,
        *,
        mask: Bool[Tensor, "B L"] | None = None,
        cu_seqlens: Int[Tensor, " borders"] | None = None,
    ) -> tuple[Float[Tensor, "B L d_model"], GateLoopState]:
        """Mix `x` along time, going on from `state`; None is the start of a stream.

        `mask` and `cu_seqlens` are those of `recurra.lengths.padded`.

        Raises:
            TypeError, ValueError: the mask or the borders do not fit x, or both are given.
        """
        if cu_seqlens is not None:
            return in_rows(self, x, state, cu_seqlens=cu_seqlens, mask=mask)
        check_lengths(x, mask, None)
        x = blank(x, mask)
        q, k, v = (self._heads(part) for part in self.qkv(x).split([self.d_qk, self.d_qk, self.d_v], -1))
        k = blank(k, mask)
        re, im = polar_planes(*self.transition(x))
        a = Planes(self._heads(keep(re, mask)), self._heads(blank(im, mask)))  # type: ignore[arg-type]
        h0 = self._start(x, a) if state is None else state.h
        y, h = gate_loop_real_part(q, k, v, a, state=h0)
        return blank(self.output_projection(self.output_gate(x, y.flatten(-2))), mask), GateLoopState(h)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1))

    def _start(self, x: Tensor, a: Planes) -> Tensor:
        shape = (x.shape[0], self.n_heads, self.d_qk // self.n_heads, self.d_v // self.n_heads)
        return torch.zeros(shape, dtype=torch.promote_types(a.re.dtype, torch.complex64), device=x.device)
