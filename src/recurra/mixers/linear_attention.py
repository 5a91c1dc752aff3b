"""Linear attention as a time-mixing layer: a recurrence that never forgets (Katharopoulos et al., arXiv 2006.16236)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require_heads
from recurra.layers.norms import at_least_float32
from recurra.lengths import mask_fill
from recurra.mixers.base import Mixer, StateSpec
from recurra.mixers.registry import register_mixer
from recurra.ops.gate_loop.operator import gate_loop

_EPSILON = 1e-6  # as in the published code


class LinearAttentionState(NamedTuple):
    """h_n = sum_{m<=n} phi(k_m)^T v_m, Katharopoulos et al. (18)-(19), in float32 (float64 in a float64 layer).

    With the normaliser the values have one more channel, which is always 1: the last column of h is then the normaliser
    z_n = sum_{m<=n} phi(k_m).
    """

    h: Float[Tensor, "B H d_k columns"]


@register_mixer("linear-attention")
class LinearAttention(Mixer):
    """y_n = W_o (phi(q_n) sum_m phi(k_m)^T v_m / phi(q_n) sum_m phi(k_m)), m <= n, phi(x) = elu(x) + 1.

    It is GateLoop with a_n = 1 (GateLoop section 3.1), and q, k, v = linear projections of x.

    The sums never forget and grow with the stream: the state has a constant size but no bound on its values. With the
    normaliser the outputs are means and stay bounded, but after about 10^7 steps a new step is too small to change a
    float32 sum, and the layer no longer hears its input. For streams without end choose a layer that forgets.

    Args:
        d_model: channels of x and y.
        d_qk: channels of queries and keys over all heads; `d_model` if None.
        d_v: channels of the values over all heads; `d_model` if None.
        n_heads: heads.
        normaliser: divide by phi(q_n) z_n, as published. Without it the outputs are sums that grow with the stream.

    Raises:
        ValueError: a size is out of range, or the heads do not divide the channels.
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
        self.d_qk, self.d_v, self.n_heads = d_qk, d_v, n_heads
        self.qkv = nn.Linear(d_model, 2 * d_qk + d_v)
        self.average = _Mean() if normaliser else _Sum()
        self.output_projection = nn.Linear(d_v, d_model)

    def mix(
        self, x: Float[Tensor, "B L d_model"], state: LinearAttentionState, mask: Bool[Tensor, "B L"] | None
    ) -> tuple[Float[Tensor, "B L d_model"], LinearAttentionState]:
        """Sum along time."""
        q, k, v = (self._heads(part) for part in self.qkv(x).split([self.d_qk, self.d_qk, self.d_v], -1))
        never = v.new_ones(()).expand(*v.shape[:3], 1)
        with torch.autocast(x.device.type, enabled=False):  # its matrix products would round sums to bfloat16
            q, k, v = _elu_plus_one(q), mask_fill(_elu_plus_one(k), mask, 0), self.average.extend(v)
            y, h = self.recur(lambda h0: gate_loop(q, k, v, never, state=h0), never, state.h)
        y = self.average.reduce(y).flatten(-2).to(x.dtype)
        return self.output_projection(y), LinearAttentionState(h)

    def _heads(self, x: Tensor) -> Tensor:
        return at_least_float32(x).unflatten(-1, (self.n_heads, -1))


class _Mean(nn.Module):
    """The sums over the normaliser, which is the sum for a value that is always 1."""

    def extend(self, v: Float[Tensor, "B L H d_v"]) -> Float[Tensor, "B L H columns"]:
        """Append the value that is always 1."""
        return functional.pad(v, (0, 1), value=1.0)

    def reduce(self, y: Float[Tensor, "B L H columns"]) -> Float[Tensor, "B L H d_v"]:
        """Divide by its sum."""
        return y[..., :-1] / (y[..., -1:] + _EPSILON)


class _Sum(nn.Module):
    """The sums themselves."""

    def extend(self, v: Float[Tensor, "B L H d_v"]) -> Float[Tensor, "B L H d_v"]:
        """Return v."""
        return v

    def reduce(self, y: Float[Tensor, "B L H d_v"]) -> Float[Tensor, "B L H d_v"]:
        """Return y."""
        return y


def _elu_plus_one(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """phi(x) = elu(x) + 1, as exp(x) below 0: (exp(x) - 1) + 1 would be 0 in float32 from x = -17 on."""
    return x.clamp(max=0).exp() + x.relu()
