"""Linear attention as a time-mixing layer: a recurrence that never forgets (Katharopoulos et al., arXiv 2006.16236)."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_heads
from recurra.layers.norms import at_least_float32
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops._operator import without_autocast
from recurra.ops.gate_loop.operator import gate_loop

_EPSILON = 1e-6  # as in the published code


class LinearAttentionState(NamedTuple):
    """h_n = sum_{m<=n} phi(k_m)^T v_m, Katharopoulos et al. (18)-(19).

    With the normaliser the values have one more channel, which is always 1: the last column of h is then the normaliser
    z_n = sum_{m<=n} phi(k_m).
    """

    h: Float[Tensor, "B H d_k columns"]


@register_mixer("linear-attention")
class LinearAttention(Mixer):
    """y_n = W_o (phi(q_n) sum_m phi(k_m)^T v_m / phi(q_n) sum_m phi(k_m)), m <= n, phi(x) = elu(x) + 1.

    It is GateLoop with a_n = 1 (GateLoop section 3.1), and q, k, v = linear projections of x.

    The sums never forget. With the normaliser, the outputs are means and stay bounded, but after about 10^7 steps a new
    step is too small to change a float32 sum. For endless streams, choose a layer that forgets.

    Args:
        d_qk: channels of queries and keys over all heads; `d_model` if None.
        d_v: channels of the values over all heads; `d_model` if None.
        n_heads: heads.
        normaliser: divide by phi(q_n) z_n, as published. Without it the outputs are sums that grow with the stream.
    """

    skips_padding = True
    is_linear_recurrence = True

    def __init__(
        self,
        d_model: int,
        *,
        d_qk: int | None = None,
        d_v: int | None = None,
        n_heads: int = 4,
        normaliser: bool = True,
    ) -> None:
        d_qk, d_v = d_model if d_qk is None else d_qk, d_model if d_v is None else d_v
        require_heads(n_heads, d_qk=d_qk, d_v=d_v)
        n_columns = d_v // n_heads + normaliser
        super().__init__(d_model, LinearAttentionState, h=StateSpec((n_heads, d_qk // n_heads, n_columns)))
        self.d_qk, self.d_v, self.n_heads, self.normaliser = d_qk, d_v, n_heads, normaliser
        self.qkv = nn.Linear(d_model, 2 * d_qk + d_v)
        self.output_projection = nn.Linear(d_v, d_model)

    def mix(self, x: Tensor, state: LinearAttentionState, mask: Tensor | None) -> tuple[Tensor, LinearAttentionState]:
        q, k, v = (self._heads(part) for part in self.qkv(x).split([self.d_qk, self.d_qk, self.d_v], -1))
        never = v.new_ones(()).expand(*v.shape[:3], 1)
        with without_autocast(x):  # its matrix products would round sums to bfloat16
            q, k = _elu_plus_one(q), mask_fill(_elu_plus_one(k), mask, 0)
            v = functional.pad(v, (0, 1), value=1.0) if self.normaliser else v
            y, h = self.recur(lambda h0: gate_loop(q, k, v, never, state=h0), never, state.h)
        y = y[..., :-1] / (y[..., -1:] + _EPSILON) if self.normaliser else y
        return self.output_projection(y.flatten(-2).to(x.dtype)), LinearAttentionState(h)

    def _heads(self, x: Tensor) -> Tensor:
        return at_least_float32(x).unflatten(-1, (self.n_heads, -1))


def _elu_plus_one(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """phi(x) = elu(x) + 1, as exp(x) below 0: (exp(x) - 1) + 1 would be 0 in float32 from x = -17 on."""
    return x.clamp(max=0).exp() + x.relu()
