"""GateLoop's softmax attention as a time-mixing layer over a sliding window (GateLoop section 3.4)."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from recurra.checks import require_heads
from recurra.layers.attention import append_to_cache, cache_limit, trim_cache
from recurra.layers.norms import at_least_float32
from recurra.layers.transition import create_transition
from recurra.mixers.base import Dim, Mixer, StateSpec, register_mixer
from recurra.ops.gate_loop.fused import polar_planes
from recurra.ops.gate_loop.reference import softmax_attention


class GateLoopAttentionState(NamedTuple):
    """Keys, values and transitions of the last p steps, p at most window - 1; all steps if there is no window."""

    keys: Float[Tensor, "B p H d_k"]
    values: Float[Tensor, "B p H d_v"]
    gates: Complex[Tensor, "B p H d_k"]


@register_mixer("gateloop-attention")
class GateLoopAttention(Mixer):
    """y_n = W_o sum_m softmax_m(Re(q_n k_m prod_{l=m+1..n} a_l) / sqrt(d_k)) v_m (GateLoop (22)-(25)).

    m runs over the last `window` steps up to n, n included, however the stream is cut. q, k, v and a_n come from x as
    in the mixer "gateloop", with one transition per key channel; the paper trains no such model, so all sizes are ours.

    Args:
        d_qk: channels of queries, keys and transitions over all heads; `d_model` if None.
        d_v: channels of the values over all heads; `d_model` if None.
        n_heads: heads.
        window: number of steps that a step attends to, itself included. None keeps the keys and values of the whole
            stream: the state and the time per step then grow with every step.
        transition: "data", controlled by the input, or "fixed", one learned a per channel.
        magnitude_activation: f in GateLoop (25), "sigmoid" or LRU's "stable_exponential".
        phase_activation: g in GateLoop (25), "identity".
        phase_scale: factor on theta before g (ours; 1 in the paper). Below 1, phases change more slowly in training.
        ring: initial transitions; None leaves them to the weights.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_qk: int | None = None,
        d_v: int | None = None,
        n_heads: int = 4,
        window: int | None = 128,
        transition: str = "data",
        magnitude_activation: str = "sigmoid",
        phase_activation: str = "identity",
        phase_scale: float = 1.0,
        ring: Mapping[str, float] | None = None,
    ) -> None:
        d_qk, d_v = d_model if d_qk is None else d_qk, d_model if d_v is None else d_v
        require_heads(n_heads, d_qk=d_qk, d_v=d_v)
        past = Dim("p", cache_limit(window))
        super().__init__(
            d_model,
            GateLoopAttentionState,
            keys=StateSpec((past, n_heads, d_qk // n_heads)),
            values=StateSpec((past, n_heads, d_v // n_heads)),
            gates=StateSpec((past, n_heads, d_qk // n_heads), is_complex=True),
        )
        self.d_qk, self.d_v, self.n_heads, self.window = d_qk, d_v, n_heads, window
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
        self.output_projection = nn.Linear(d_v, d_model)

    def transition_parameters(self) -> set[nn.Parameter]:
        return set(self.transition.parameters())

    def why_not_exportable(self) -> str:
        return "gateloop-attention keeps the last steps themselves, and their number grows up to its window"

    def mix(self, x: Tensor, state: GateLoopAttentionState, mask: None) -> tuple[Tensor, GateLoopAttentionState]:
        q, k, v = (self._heads(part) for part in self.qkv(x).split([self.d_qk, self.d_qk, self.d_v], -1))
        re, im = polar_planes(*self.transition(x))
        known = append_to_cache(state, GateLoopAttentionState(k, v, self._heads(torch.complex(re, im))))  # type: ignore[arg-type]
        y = softmax_attention(q, *known, window=self.window)
        return self.output_projection(y.flatten(-2).to(x.dtype)), trim_cache(known, self.window)

    def _heads(self, x: Tensor) -> Tensor:
        return at_least_float32(x).unflatten(-1, (self.n_heads, -1))
