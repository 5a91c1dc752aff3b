"""The GateLoop layer: data-controlled linear recurrence as a mixer (GateLoop section 4, GateLoop App. C)."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import Complex, Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_heads
from recurra.layers.transition import create_transition
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops.gate_loop.fused import Planes, polar_planes
from recurra.ops.gate_loop.operator import gate_loop_real_part


class GateLoopState(NamedTuple):
    """The hidden state h_n."""

    h: Complex[Tensor, "B H d_k d_v"]


class _OutputGate(nn.Module):
    """y * SiLU(W_g x): the input decides what leaves a recurrence for its output projection."""

    def __init__(self, d_model: int, d_v: int) -> None:
        super().__init__()
        self.projection = nn.Linear(d_model, d_v)

    def forward(self, x: Float[Tensor, "B L d_model"], y: Float[Tensor, "B L d_v"]) -> Float[Tensor, "B L d_v"]:
        """Gate y, the recurrence's output, by x, its input."""
        return y * functional.silu(self.projection(x))


@register_mixer("gateloop")
class GateLoop(Mixer):
    """y_n = W_o Re(q_n h_n), h_n = h_{n-1} a_n + k_n^T v_n (GateLoop (7)-(8)).

    q, k, v and a_n come from x_n (GateLoop (24)-(25)).

    Args:
        d_qk: channels of queries, keys and transitions over all heads; `d_model` if None.
        d_v: channels of the values over all heads; `d_model` if None.
        n_heads: heads; `d_qk` if None, the max-headed case d_h = 1 that the paper trains.
        transition: "data", controlled by the input, or "fixed", one learned a per channel; nothing else changes.
        magnitude_activation: f in GateLoop (25), "sigmoid" or LRU's "stable_exponential".
        phase_activation: g in GateLoop (25), "identity".
        phase_scale: factor on theta before g (ours; 1 in the paper). Below 1, phases change more slowly in training.
        ring: initial transitions, given by `r_min`, `r_max`, `max_phase` and others; None leaves them to the weights.
        output_gate: multiply Re(q_n h_n) by SiLU(W_g x_n) before the output projection (ours; off in the paper).
    """

    skips_padding = True
    is_linear_recurrence = True

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
        phase_scale: float = 1.0,
        ring: Mapping[str, float] | None = None,
        output_gate: bool = False,
    ) -> None:
        d_qk, d_v = d_model if d_qk is None else d_qk, d_model if d_v is None else d_v
        n_heads = d_qk if n_heads is None else n_heads
        require_heads(n_heads, d_qk=d_qk, d_v=d_v)
        super().__init__(
            d_model, GateLoopState, h=StateSpec((n_heads, d_qk // n_heads, d_v // n_heads), is_complex=True)
        )
        self.d_qk, self.d_v, self.n_heads = d_qk, d_v, n_heads
        self.qkv = nn.Linear(d_model, 2 * d_qk + d_v)
        self.transition = create_transition(
            d_model,
            d_qk,
            transition=transition,
            magnitude_activation=magnitude_activation,
            phase_activation=phase_activation,
            phase_scale=phase_scale,
            ring=ring,
        )
        self.output_gate = _OutputGate(d_model, d_v) if output_gate else None
        self.output_projection = nn.Linear(d_v, d_model)

    def transition_parameters(self) -> set[nn.Parameter]:
        return set(self.transition.parameters())

    def mix(self, x: Tensor, state: GateLoopState, mask: Tensor | None) -> tuple[Tensor, GateLoopState]:
        q, k, v = (self._heads(part) for part in self.qkv(x).split([self.d_qk, self.d_qk, self.d_v], -1))
        re, im = polar_planes(*self.transition(x))
        a = Planes(self._heads(mask_fill(re, mask, 1)), self._heads(mask_fill(im, mask, 0)))  # type: ignore[arg-type]
        k = mask_fill(k, mask, 0)
        y, h = self.recur(lambda h0: gate_loop_real_part(q, k, v, a, state=h0), a, state.h)
        y = y.flatten(-2)
        return self.output_projection(y if self.output_gate is None else self.output_gate(x, y)), GateLoopState(h)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.n_heads, x.shape[2] // self.n_heads)
