"""The steps of an sLSTM over a sequence: by kernels on a CPU, with the recurrent weights' gradient in one product."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from recurra.checks import kind_of, sentence
from recurra.ops._operator import (
    Differentiable,
    OneNode,
    addresses,
    is_any_length,
    needs_gradient,
    numba_kernels_take,
    require_layouts,
    usable_threads,
)
from recurra.ops.cells._gru_steps import in_panels

_NEVER = -1e30  # the stabiliser before the first step; finite, so that no difference is NaN


class SLSTMParts(NamedTuple):
    """The state of an sLSTM by heads: the cell and the normaliser, both times exp(-m), the stabiliser, the output."""

    c: Float[Tensor, "B H d"]
    n: Float[Tensor, "B H d"]
    m: Float[Tensor, "B H d"]
    h: Float[Tensor, "B H d"]


_Results = tuple[Float[Tensor, "B L H d"], SLSTMParts]


def slstm_sequence(
    projected: Float[Tensor, "B L 4 H d"], weights: Float[Tensor, "H d gates"], state: SLSTMParts
) -> _Results:
    """Take the steps of an sLSTM (Beck et al. (8)-(17)) along `projected`.

    On a CPU a kernel takes all steps in float32, and one backward. It is the reference itself for other types and
    devices, for a single step without gradients, and under torch.compile, torch.func and forward derivatives.

    Args:
        projected: W x + b of all steps, at least one, for the gates z, i, f and o.
        weights: R of each head, for a row h on its left: the columns of z, i, f and o.
        state: before the first step; n is 0 at the start of a stream.

    Returns:
        h of all steps, and the last state. No gradient flows through the stabiliser of a step.

    Raises:
        ValueError: a tensor has another shape than above, or another type or device than `projected`.
    """
    _check(projected, weights, state)
    inputs = (projected, weights, *state)
    if is_any_length(projected.shape[1]):
        y, *last = _any_steps(*inputs)
        return y, SLSTMParts(*last)
    is_one_step = projected.shape[1] == 1 and not needs_gradient(*inputs)
    if is_one_step or not numba_kernels_take(projected):
        return slstm_sequence_reference(projected, weights, state)
    y, *last = _slstm_sequence(*inputs)
    return y, SLSTMParts(*last)


def _check(projected: Tensor, weights: Tensor, state: SLSTMParts) -> None:
    if projected.ndim != 5 or projected.shape[2] != 4:
        raise ValueError(sentence("projected", kind_of(projected), "(B, L, 4, H, d)"))
    (batch, _, _, heads, size), kind = projected.shape, (projected.dtype, projected.device)
    of_state = {f"state.{name}": (tensor, (batch, heads, size)) for name, tensor in zip(state._fields, state)}
    require_layouts(*kind, weights=(weights, (heads, size, 4 * size)), **of_state)


def slstm_sequence_reference(
    projected: Float[Tensor, "B L 4 H d"], weights: Float[Tensor, "H d gates"], state: SLSTMParts
) -> _Results:
    """Take the same steps in plain operators."""
    return slstm_after_products(projected, state, lambda inputs, h: torch.baddbmm(inputs, h, weights))


def slstm_after_products(
    projected: Float[Tensor, "B L 4 H d"], state: SLSTMParts, add_product: Callable[[Tensor, Tensor], Tensor]
) -> _Results:
    """Take the same steps with `add_product` (H, B, 4 d), (H, B, d) -> (H, B, 4 d), which adds R h to the inputs."""
    steps = projected.permute(1, 3, 0, 2, 4).flatten(-2)  # L, H, B and the four of a head, as in R
    c, n, m, h = (x.transpose(0, 1) for x in state)
    m = torch.where(n > 0, m, _NEVER)  # the first step's input gate is then the stabiliser
    outputs = []
    for inputs in steps.unbind(0):
        z, i, f, o = add_product(inputs, h).chunk(4, -1)
        log_f = functional.logsigmoid(f)
        before, m = m, torch.maximum(log_f + m, i).detach()
        forget, write = torch.exp(log_f + before - m), torch.exp(i - m)
        c, n = forget * c + write * torch.tanh(z), forget * n + write
        h = torch.sigmoid(o) * c / n
        outputs.append(h)
    return torch.stack(outputs).permute(2, 0, 1, 3), SLSTMParts(*(x.transpose(0, 1) for x in (c, n, m, h)))


def _by_heads(x: Float[Tensor, "B L H d"]) -> Float[Tensor, "H L B d"]:
    return x.permute(2, 1, 0, 3).contiguous()


def _sizes(length: int, batch: int, heads: int, size: int) -> tuple[tuple[int, ...], dict[str, int]]:
    shares = min(batch, -(-usable_threads() // heads))
    span = -(-batch // shares)
    jobs, work = heads * -(-batch // span), 4 * heads * length * batch * size * size
    return (heads, length, batch, size, span), {"jobs": jobs, "work": work}


def _forward(keep: bool, projected: Tensor, weights: Tensor, *state: Tensor) -> tuple[tuple, tuple]:
    """Heads come first and time second in everything that is kept: L steps of B sequences."""
    from recurra.ops.cells._cpu import slstm_forward

    batch, length, _, heads, size = projected.shape
    gates = projected.permute(3, 1, 0, 2, 4).clone(memory_format=torch.contiguous_format)
    states = projected.new_empty(4, heads, length + 1, batch, size)
    for part, first in zip(states, state):
        part[:, 0] = first.transpose(0, 1)
    starts = states[:, :, 0]
    starts[2].masked_fill_(~(starts[1] > 0), _NEVER)
    panels, (sizes, work) = in_panels(weights), _sizes(length, batch, heads, size)
    slstm_forward(*addresses(gates, panels, *states), *sizes, **work)
    # Copies, which contiguous() does not make of one head: the caller may change y, and keeps the last state alone.
    y = states[3, :, 1:].permute(2, 1, 0, 3).clone(memory_format=torch.contiguous_format)
    last = [part[:, -1].transpose(0, 1).clone(memory_format=torch.contiguous_format) for part in states]
    return (y, *last), (projected, weights, *state, gates, states)


def _backward(gradients: tuple, saved: tuple, needs: tuple) -> tuple[Tensor | None, ...]:
    from recurra.ops.cells._cpu import slstm_backward

    *inputs, gates, states = saved
    _check(inputs[0], inputs[1], SLSTMParts(*inputs[2:]))  # again: hooks may have changed what was saved
    weights, (batch, length, _, heads, size) = inputs[1], inputs[0].shape
    like = (torch.float32, torch.device("cpu"))
    of_gates, of_states = (heads, length, batch, 4, size), (4, heads, length + 1, batch, size)
    known = {"weights": (weights, (heads, size, 4 * size)), "gates": (gates, of_gates), "states": (states, of_states)}
    require_layouts(*like, **known)
    gates, states = gates.contiguous(), states.contiguous()
    d_y, d_c, d_n, _, d_h = gradients
    by_time = states.new_zeros(heads, length, batch, size) if d_y is None else _by_heads(d_y)
    carried = states.new_zeros(3, heads, batch, size)
    for carry, gradient in zip(carried, (d_c, d_n, d_h)):
        if gradient is not None:
            carry.copy_(gradient.transpose(0, 1))
    panels, (sizes, work) = in_panels(weights.transpose(1, 2)), _sizes(length, batch, heads, size)
    d_gates = torch.empty_like(gates)
    slstm_backward(*addresses(by_time, gates, panels, *states, d_gates, *carried), *sizes, **work)
    d_weights = None
    if needs[1]:
        with torch.autocast("cpu", enabled=False):
            d_weights = states[3, :, :-1].flatten(1, 2).transpose(1, 2) @ d_gates.view(heads, length * batch, 4 * size)
    to_c, to_n, to_h = (carry.transpose(0, 1) for carry in carried)
    first_c, first_n = (part[:, 0].transpose(0, 1) for part in states[:2])
    to_m = to_c * first_c + to_n * first_n  # both are exp(-m) times what they measure
    return d_gates.permute(2, 1, 3, 0, 4), d_weights, to_c, to_n, to_m, to_h


def _reference_of_tensors(projected: Tensor, weights: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    y, last = slstm_sequence_reference(projected, weights, SLSTMParts(*state))
    return y, *last


_slstm_sequence = Differentiable(_forward, _backward, n_inputs=6, reference=_reference_of_tensors, constant=(3,))


def _steps(projected: Tensor, weights: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    y, last = slstm_sequence(projected, weights, SLSTMParts(*state))
    return y, *last


_any_steps = OneNode(
    "slstm_steps(Tensor projected, Tensor weights, Tensor c, Tensor n, Tensor m, Tensor h) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _steps,
    lambda projected, weights, *state: (
        projected.new_empty((*projected.shape[:2], *projected.shape[3:])),
        *(x.new_empty(x.shape) for x in state),
    ),
    n_inputs=6,
)
