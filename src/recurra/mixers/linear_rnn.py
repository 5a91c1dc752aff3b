"""The linear RNN of the lecture notes: a linear recurrence followed by all non-linearities."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import choose, require_at_least
from recurra.layers.norms import at_least_float32
from recurra.layers.state_space import log_spaced_steps
from recurra.layers.transition import stable_exponential
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops.scan.operator import linear_scan
from recurra.ops.scan.reference import matrix_scan
from recurra.state import last_step


class _DiagonalRecurrence(nn.Module):
    """h_t = a h_{t-1} + b_t with a = exp(-exp(alpha)), one real number in (0, 1) per state channel."""

    def __init__(self, d_state: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(log_spaced_steps(d_state, 0.001, 0.1))

    def forward(self, b: Float[Tensor, "B L N"], h0: Float[Tensor, "B N"]) -> Float[Tensor, "B L N"]:
        return linear_scan(stable_exponential(at_least_float32(self.alpha)), b, h0)

    @torch.no_grad()
    def stationary_scale(self) -> Float[Tensor, " N"]:
        return torch.sqrt(-torch.expm1(-2 * torch.exp(self.alpha)))


class _DenseRecurrence(nn.Module):
    """h_t = A h_{t-1} + b_t with a dense A, at the start 0.99 times a random orthogonal matrix."""

    def __init__(self, d_state: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(0.99 * nn.init.orthogonal_(torch.empty(d_state, d_state)))

    def forward(self, b: Float[Tensor, "B L N"], h0: Float[Tensor, "B N"]) -> Float[Tensor, "B L N"]:
        return matrix_scan(at_least_float32(self.matrix), b, h0)

    @torch.no_grad()
    def stationary_scale(self) -> Float[Tensor, " N"]:
        return torch.full_like(self.matrix[0], (1 - 0.99**2) ** 0.5)


_RECURRENCES: dict[str, type[_DiagonalRecurrence] | type[_DenseRecurrence]] = {
    "diagonal": _DiagonalRecurrence,
    "dense": _DenseRecurrence,
}


class LinearRNNState(NamedTuple):
    """The hidden state."""

    h: Float[Tensor, "B N"]


@register_mixer("linear-rnn")
class LinearRNN(Mixer):
    """h_t = A h_{t-1} + B x_t,  z_t = GELU(C h_t + D x_t + bias), real throughout.

    The recurrence is GateLoop (1) without its sigma (notes, linear RNN; notes, convolution; notes, layer above).
    Our choices, where the notes leave it open: f is GELU; B is initialised from N(0, 1 / d_model) times
    sqrt(1 - |a|^2), which gives states the variance of their input; C and D are linear.

    Args:
        d_model: channels of x and z.
        d_state: channels of h; `d_model` if None.
        transition: "diagonal" or "dense" A.
    """

    def __init__(self, d_model: int, *, d_state: int | None = None, transition: str = "diagonal") -> None:
        d_state = d_model if d_state is None else d_state
        require_at_least(1, d_model=d_model, d_state=d_state)
        super().__init__(d_model, LinearRNNState, h=StateSpec((d_state,)))
        self.recurrence = choose("transition", _RECURRENCES, transition)(d_state)
        scale = self.recurrence.stationary_scale()[:, None] * d_model**-0.5
        self.input_weights = nn.Parameter(torch.randn(d_state, d_model) * scale)
        self.output_projection = nn.Linear(d_state, d_model)
        self.skip = nn.Linear(d_model, d_model, bias=False)

    def transition_parameters(self) -> set[nn.Parameter]:
        return set(self.recurrence.parameters())

    @property
    def transition(self) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        """x -> |a| and its phase, which is 0, for every channel of h: the same at every step. None if A is dense."""
        return self._transition if isinstance(self.recurrence, _DiagonalRecurrence) else None

    def _transition(self, x: Float[Tensor, "B L D"]) -> tuple[Float[Tensor, "B L N"], Float[Tensor, "B L N"]]:
        a = stable_exponential(at_least_float32(self.recurrence.alpha)).expand(*x.shape[:2], -1)  # type: ignore[arg-type]
        return a, torch.zeros_like(a)

    def mix(self, x: Tensor, state: LinearRNNState, mask: None) -> tuple[Tensor, LinearRNNState]:
        b = at_least_float32(functional.linear(x, self.input_weights))
        h = self.recurrence(b, state.h)
        z = self.output_projection(h.to(x.dtype)) + self.skip(x)
        return functional.gelu(z), LinearRNNState(last_step(h, state.h))
