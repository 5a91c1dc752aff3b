"""torch's GRU as a mixer: the classic recurrence, which trains step by step, as a baseline."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.layers.norms import at_least_float32
from recurra.mixers.base import Mixer, StateSpec, register_mixer
from recurra.ops._operator import OneNode, is_any_length, transforms_are_active, without_autocast
from recurra.ops.cells._gru_steps import kernels_take
from recurra.ops.cells.gru import HiddenWeights, gru_after, gru_after_reference


class GRUState(NamedTuple):
    """The last hidden state."""

    h: Float[Tensor, "B N"]


@register_mixer("gru")
class GRU(Mixer):
    """y_t = h_t of `torch.nn.GRU` with one layer (Cho et al., arXiv 1406.1078, with the reset gate after the product).

    It trains step by step, on a CPU in one kernel for all steps. Autocast leaves the recurrence in float32. CRT's cell
    is different: its reset gate acts before the product, and `recurra.mixers.rnn.RNN` runs it.
    """

    transition_looks_back = True

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, GRUState, h=StateSpec((d_model,)))
        self.cell = nn.GRUCell(d_model, d_model)

    def transition(
        self, x: Float[Tensor, "B L N"], state: GRUState | None = None
    ) -> tuple[Float[Tensor, "B L N"], Float[Tensor, "B L N"]]:
        """Return z_t, the share of h_{t-1} that stays, and its phase, which is 0, for every channel, after `state`;
        None starts a stream."""
        cell, state = self.cell, self.initial_state(x.shape[0]) if state is None else state
        before = state.h[:, None]
        if x.shape[1] > 1:
            before = torch.cat([before, self.mix(x, state, None)[0][:, :-1]], 1)
        of_x, of_h = (
            functional.linear(part.to(weight.dtype), weight.chunk(3)[1], bias.chunk(3)[1])
            for part, weight, bias in ((x, cell.weight_ih, cell.bias_ih), (before, cell.weight_hh, cell.bias_hh))
        )
        z = torch.sigmoid(at_least_float32(of_x + of_h))
        return z, torch.zeros_like(z)

    def mix(self, x: Tensor, state: GRUState, mask: None) -> tuple[Tensor, GRUState]:
        cell, h = self.cell, state.h
        if x.is_cpu and not torch.compiler.is_compiling() and not transforms_are_active():
            projected, weights = functional.linear(x, cell.weight_ih, cell.bias_ih), HiddenWeights(*self._of_state())
            if kernels_take(projected, h):
                many = x.shape[1] > 1 or torch.is_grad_enabled()
                y, last = gru_after(projected, h, weights) if many else self._one_step(projected, h, weights)
                return y.to(projected.dtype), GRUState(last)
        return self._by_torch(x, h.to(cell.weight_hh.dtype))

    def _of_state(self) -> tuple[Tensor, Tensor]:
        return self.cell.weight_hh, self.cell.bias_hh

    def _one_step(self, projected: Tensor, h: Tensor, weights: HiddenWeights) -> tuple[Tensor, Tensor]:
        with without_autocast(projected):
            return gru_after_reference(projected, h, weights)

    def _by_torch(self, x: Tensor, h: Tensor) -> tuple[Tensor, GRUState]:
        """Call nn.GRU's own function, as torch.compile refuses the module."""
        cell = self.cell
        with without_autocast(x):  # on a GPU it would take the state down to 16 bits
            if transforms_are_active():  # torch.gru has no rules for them
                projected = functional.linear(x.to(h.dtype), cell.weight_ih, cell.bias_ih)
                y, last = gru_after_reference(projected, h, HiddenWeights(*self._of_state()))
                return y.to(x.dtype), GRUState(at_least_float32(last))
            weights = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
            steps = _any_steps if is_any_length(x.shape[1]) else _steps
            y, last = steps(x.to(h.dtype), h, *weights)
        return y.to(x.dtype), GRUState(at_least_float32(last))


def _steps(x: Tensor, h: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    # With biases, one layer, no dropout, as in training (cuDNN gives no gradients otherwise), one direction, batch
    # first. cuDNN takes no state with gaps.
    y, last = torch.gru(x, h.unsqueeze(0).contiguous(), weights, True, 1, 0.0, True, False, True)
    return y, last.squeeze(0)


_any_steps = OneNode(
    "gru_steps(Tensor x, Tensor h, Tensor weight_ih, Tensor weight_hh, Tensor bias_ih, Tensor bias_hh) -> "
    "(Tensor, Tensor)",
    _steps,
    lambda x, h, *_: (x.new_empty((*x.shape[:2], h.shape[1])), h.new_empty(h.shape)),
    n_inputs=6,
)
