"""The steps of a GRU cell over a sequence, with a backward pass that makes each weight's gradient in one product.

Left to autograd, every step backwards multiplies the few sequences of a batch into a gradient as large as the recurrent
matrices and adds it to the last one: more memory traffic than the step itself. Here the gradients that reach the gates
are kept, and one product over all sequences and steps makes the matrices' gradients. Kernels take the steps themselves,
on a CPU (`gru_kernels`) and on a GPU (`gru_triton`). Elsewhere, and in float64, whatever can be computed for all steps
at once is.
"""

from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.cells import gru_steps
from recurra.cells.gru import GRUCell, RecurrentWeights
from recurra.cells.gru_steps import Steps
from recurra.checks import kind_of, require_layout, sentence
from recurra.kernels.operator import Differentiable, needs_gradient, transforms_are_active

_FEW = 32
"""The most sequences in bfloat16 that the kernels take: measured at 380 channels (docs/lab-log.md)."""

States = tuple[Float[Tensor, "B L H"], Float[Tensor, "B H"]]


def gru_sequence(
    cell: GRUCell, projected: Float[Tensor, "B L projected"], h: Float[Tensor, "B H"], weights: RecurrentWeights
) -> States:
    """Take the steps of `cell` (CRT (4)) along `projected`, from the state `h`.

    It is the reference itself if no gradient is needed, for a cell that overrides `step` or `gates`, and under
    torch.compile, torch.func and forward derivatives.

    Args:
        cell: the cell whose steps to take.
        projected: the result of `cell.project` for all steps.
        h: the state before them, as `cell.entering` returns it.
        weights: `cell.recurrent_weights`, in the precision of `projected`.

    Returns:
        The states after every step and the last of them, in the precision of `h`.

    Raises:
        ValueError: a tensor has another shape than above, or another type or device than `projected`; the type of h can
            be wider.
    """
    inputs = (projected, h, *weights)
    _check(cell.hidden_size, *inputs)
    if (
        not needs_gradient(*inputs)
        or not projected.shape[1]
        or type(cell).step is not GRUCell.step
        or type(cell).gates is not GRUCell.gates
        or torch.compiler.is_compiling()
        or transforms_are_active()
    ):
        return gru_sequence_reference(cell, projected, h, weights)
    y, last = _gru_sequence(*inputs, cell)
    return y, last


def _check(size: int, projected: Tensor, h: Tensor, of_gates: Tensor, of_candidate: Tensor) -> None:
    shape, dtype, device = projected.shape, projected.dtype, projected.device
    if len(shape) != 3 or shape[2] != 3 * size:
        raise ValueError(sentence("projected", kind_of(projected), f"(B, L, {3 * size})"))
    require_layout("h", h, (shape[0], size), h.dtype, device)
    require_layout("weights.gates", of_gates, (2 * size, size), dtype, device)
    require_layout("weights.candidate", of_candidate, (size, size), dtype, device)


def gru_sequence_reference(
    cell: GRUCell, projected: Float[Tensor, "B L projected"], h: Float[Tensor, "B H"], weights: RecurrentWeights
) -> States:
    """Take the same steps by `cell.step`, one after the other."""
    states = []
    for projected_step in projected.unbind(1):
        h = cell.step(projected_step, h, weights)
        states.append(h)
    y = torch.stack(states, 1) if states else projected[..., : cell.hidden_size].to(h.dtype)
    return y, h


def _kernels(projected: Tensor, h: Tensor) -> ModuleType | None:
    """Return the kernels that take the steps, `gru_steps` or `gru_triton`, or None.

    Those of a CPU compute in float32, so many sequences are faster by bfloat16 products.
    """
    if gru_steps.kernels_take(projected, h, "triton"):
        from recurra.cells import gru_triton

        return gru_triton if h.shape[1] <= gru_triton.LARGEST else None
    takes = gru_steps.kernels_take(projected, h)
    return gru_steps if takes and (projected.dtype == torch.float32 or projected.shape[0] <= _FEW) else None


def _forward(
    keep: bool, projected: Tensor, h: Tensor, of_gates: Tensor, of_candidate: Tensor, cell: GRUCell
) -> tuple[tuple, tuple]:
    """Time comes first in everything that is kept: L steps of B sequences."""
    inputs = (projected, h, of_gates, of_candidate)
    kernels = _kernels(projected, h)
    steps = _forward_by_operations(*inputs) if kernels is None else kernels.forward(*inputs)
    y = steps.states[1:].transpose(0, 1).clone(memory_format=torch.contiguous_format)  # the caller may change it
    return (y, steps.states[-1].clone()), (*inputs, *steps)


def _forward_by_operations(projected: Tensor, h: Tensor, of_gates: Tensor, of_candidate: Tensor) -> Steps:
    """Take the steps one torch operation after the other."""
    (batch, length, _), size = projected.shape, h.shape[1]
    gate_inputs, candidate_inputs = projected.transpose(0, 1).split([2 * size, size], -1)
    ru = projected.new_empty(length, batch, 2 * size)
    c, reset = projected.new_empty(2, length, batch, size)
    states = h.new_empty(length + 1, batch, size)
    states[0] = h
    for t in range(length):
        before = states[t]
        torch.addmm(gate_inputs[t], before.to(ru.dtype), of_gates.t(), out=ru[t]).sigmoid_()
        r, u = ru[t].chunk(2, -1)
        reset[t] = r * before
        torch.addmm(candidate_inputs[t], reset[t], of_candidate.t(), out=c[t]).tanh_()
        torch.lerp(before, c[t].to(h.dtype), u.to(h.dtype), out=states[t + 1])
    return Steps(ru, c, reset, states)


def _backward(gradients: tuple, saved: tuple, needs: tuple, cell: GRUCell) -> tuple[Tensor | None, ...]:
    projected, h, of_gates, of_candidate, ru, c, reset, states = saved
    kernels = _kernels(projected, h)
    if kernels is not None:
        d_inputs, d_h = kernels.backward(Steps(ru, c, reset, states), of_gates, of_candidate, *gradients)
    else:
        ru, c = ru.to(projected.dtype), c.to(projected.dtype)
        d_inputs, d_h = _gradients_of_steps(of_gates, of_candidate, ru, c, states, *gradients)
    d_inputs = d_inputs.to(projected.dtype)
    rows = d_inputs.flatten(0, 1)
    d_gates, d_candidate = rows.split([ru.shape[-1], c.shape[-1]], -1)
    return (
        d_inputs.transpose(0, 1),
        d_h,
        d_gates.t() @ states[:-1].flatten(0, 1).to(rows.dtype) if needs[2] else None,
        d_candidate.t() @ reset.flatten(0, 1).to(rows.dtype) if needs[3] else None,
    )


def _gradients_of_steps(
    of_gates: Tensor,
    of_candidate: Tensor,
    ru: Float[Tensor, "L B gates"],
    c: Float[Tensor, "L B H"],
    states: Float[Tensor, "L+1 B H"],
    d_y: Float[Tensor, "B L H"] | None,
    d_last: Float[Tensor, "B H"] | None,
) -> tuple[Float[Tensor, "L B projected"], Float[Tensor, "B H"]]:
    """Compute the gradients of the projected inputs, which are also those of the products with U, and of the state."""
    length = len(c)
    r, u = ru.to(states.dtype).chunk(2, -1)
    before, candidate = states[:-1], c.to(states.dtype)
    keeps = 1 - u
    by_r, by_u, by_c = before * r * (1 - r), (candidate - before) * u * keeps, u * (1 - candidate * candidate)
    d_h = torch.zeros_like(states[0]) if d_last is None else d_last
    d_inputs = []
    for t in reversed(range(length)):
        if d_y is not None:
            d_h = d_h + d_y[:, t]
        d_c = (d_h * by_c[t]).to(c.dtype)
        d_reset = (d_c @ of_candidate).to(d_h.dtype)
        d_gates = torch.cat([d_reset * by_r[t], d_h * by_u[t]], -1).to(c.dtype)
        d_h = torch.addcmul(d_h * keeps[t], d_reset, r[t]) + d_gates @ of_gates
        d_inputs.append(torch.cat([d_gates, d_c], -1))
    return torch.stack(d_inputs[::-1]), d_h


_gru_sequence = Differentiable(
    _forward,
    _backward,
    n_inputs=4,
    reference=lambda projected, h, gates, candidate, cell: gru_sequence_reference(
        cell, projected, h, RecurrentWeights(gates, candidate)
    ),
)
