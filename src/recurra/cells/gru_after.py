"""The steps of torch.nn.GRU over a sequence by kernels: its reset gate acts after the product with the state."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from recurra.cells.gru_steps import Steps, backward_after, forward_after
from recurra.checks import require_layout
from recurra.kernels.operator import Differentiable

States = tuple[Float[Tensor, "B L H"], Float[Tensor, "B H"]]


class HiddenWeights(NamedTuple):
    """What a `torch.nn.GRUCell` multiplies the state by, and adds: `weight_hh` and `bias_hh`."""

    weight: Float[Tensor, "gates H"]
    bias: Float[Tensor, " gates"]


def gru_after(projected: Float[Tensor, "B L gates"], h: Float[Tensor, "B H"], weights: HiddenWeights) -> States:
    """Take the steps along W x + b for all steps, from the state `h`, by kernels that `gru_steps.kernels_take` allows.

    Returns:
        The states after every step and the last of them, in float32; so is all arithmetic between products with x.

    Raises:
        ValueError: a tensor has another shape than above, or another type or device than the kernels take.
    """
    size = h.shape[-1]
    for name, tensor, shape in (
        ("projected", projected, (h.shape[0], projected.shape[1], 3 * size)),
        ("weights.weight", weights.weight, (3 * size, size)),
        ("weights.bias", weights.bias, (3 * size,)),
    ):
        require_layout(name, tensor, shape, tensor.dtype, torch.device("cpu"))
    y, last = _gru_after(projected, h, *weights)
    return y, last


def gru_after_reference(
    projected: Float[Tensor, "B L gates"], h: Float[Tensor, "B H"], weights: HiddenWeights
) -> States:
    """Take the same steps in plain operators, in the precision of `h`."""
    states, (weight, bias) = [], (w.to(h.dtype) for w in weights)
    for step in projected.to(h.dtype).unbind(1):
        r_x, u_x, c_x = step.chunk(3, -1)
        r_h, u_h, c_h = functional.linear(h, weight, bias).chunk(3, -1)
        candidate = torch.tanh(c_x + torch.sigmoid(r_x + r_h) * c_h)
        h = candidate + torch.sigmoid(u_x + u_h) * (h - candidate)
        states.append(h)
    return torch.stack(states, 1), h


def _forward(keep: bool, *inputs: Tensor) -> tuple[tuple, tuple]:
    steps = forward_after(*inputs)
    y = steps.states[1:].transpose(0, 1).clone(memory_format=torch.contiguous_format)  # the caller may change it
    return (y, steps.states[-1].clone()), (*inputs, *steps)


def _backward(gradients: tuple, saved: tuple, needs: tuple) -> tuple[Tensor | None, ...]:
    (projected, _, weight, bias), steps = saved[:4], Steps(*saved[4:])
    d_inputs, d_hidden, d_h = backward_after(steps, weight, *gradients)
    rows = d_hidden.flatten(0, 1)
    d_weight = rows.to(projected.dtype).t() @ steps.states[:-1].flatten(0, 1).to(projected.dtype)
    return d_inputs.transpose(0, 1).to(projected.dtype), d_h, d_weight.to(weight.dtype), rows.sum(0).to(bias.dtype)


_gru_after = Differentiable(
    _forward,
    _backward,
    n_inputs=4,
    reference=lambda projected, h, *weights: gru_after_reference(projected, h, HiddenWeights(*weights)),
)
