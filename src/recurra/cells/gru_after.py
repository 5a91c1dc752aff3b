"""The steps of torch.nn.GRU over a sequence by kernels: its reset gate acts after the product with the state."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from recurra.cells.gru_steps import Steps, backward_after, forward_after
from recurra.checks import require_layout
from recurra.kernels.operators import are_batched, differentiable_gradients

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
    y, last = _GRUAfter.apply(projected, h, *weights)
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


class _GRUAfter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        steps = forward_after(projected, h, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(projected, h, weight, bias, *steps)
        y = steps.states[1:].transpose(0, 1).clone(memory_format=torch.contiguous_format)  # the caller may change it
        return y, steps.states[-1].clone()

    @staticmethod
    def backward(ctx: Any, d_y: Tensor | None, d_last: Tensor | None) -> tuple[Tensor | None, ...]:
        projected, h, weight, bias, *saved = ctx.saved_tensors
        # gradients that will be differentiated again, or a batch of them, which has no address
        if torch.is_grad_enabled() or are_batched(d_y, d_last):
            reference = lambda projected, h, *weights: gru_after_reference(projected, h, HiddenWeights(*weights))  # noqa: E731
            return differentiable_gradients(reference, (projected, h, weight, bias), (d_y, d_last))
        steps = Steps(*saved)
        d_inputs, d_hidden, d_h = backward_after(steps, weight, d_y, d_last)
        rows = d_hidden.flatten(0, 1)
        d_weight = rows.to(projected.dtype).t() @ steps.states[:-1].flatten(0, 1).to(projected.dtype)
        return d_inputs.transpose(0, 1).to(projected.dtype), d_h, d_weight.to(weight.dtype), rows.sum(0).to(bias.dtype)
