"""The gated recurrent unit: one step (CRT (4)), a sequence by kernels, and torch.nn.GRU's variant whose reset gate acts
after the product.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import kind_of, require_at_least, require_layout, sentence
from recurra.ops._operator import Differentiable, OneNode, is_any_length, needs_gradient, transforms_are_active
from recurra.ops.cells import _gru_steps as gru_steps
from recurra.ops.cells._gru_steps import Steps, backward_after, forward_after

_States = tuple[Float[Tensor, "B L H"], Float[Tensor, "B H"]]


class HiddenWeights(NamedTuple):
    """What a `torch.nn.GRUCell` multiplies the state by, and adds: `weight_hh` and `bias_hh`."""

    weight: Float[Tensor, "gates H"]
    bias: Float[Tensor, " gates"]


def gru_after(projected: Float[Tensor, "B L gates"], h: Float[Tensor, "B H"], weights: HiddenWeights) -> _States:
    """Take the steps along W x + b for all steps, from the state `h`, by kernels that `gru_steps.kernels_take` allows.

    Returns:
        The states after every step and the last of them, in float32; so is all arithmetic between products with x.
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
) -> _States:
    """Take the same steps in plain operators, in the precision of `h`."""
    weight, bias = (w.to(h.dtype) for w in weights)
    return gru_after_products(projected.to(h.dtype), h, lambda h: functional.linear(h, weight, bias))


def gru_after_products(
    projected: Float[Tensor, "B L gates"], h: Float[Tensor, "B H"], multiply: Callable[[Tensor], Tensor]
) -> _States:
    """Take the same steps with `multiply` (B, H) -> (B, gates) for the product with the state."""
    states = []
    for step in projected.unbind(1):
        r_x, u_x, c_x = step.chunk(3, -1)
        r_h, u_h, c_h = multiply(h).chunk(3, -1)
        candidate = torch.tanh(c_x + torch.sigmoid(r_x + r_h) * c_h)
        h = candidate + torch.sigmoid(u_x + u_h) * (h - candidate)
        states.append(h)
    return torch.stack(states, 1), h


def _forward_after(keep: bool, *inputs: Tensor) -> tuple[tuple, tuple]:
    steps = forward_after(*inputs)
    y = steps.states[1:].transpose(0, 1).clone(memory_format=torch.contiguous_format)  # the caller may change it
    return (y, steps.states[-1].clone()), (*inputs, *steps)


def _backward_after(gradients: tuple, saved: tuple, needs: tuple) -> tuple[Tensor | None, ...]:
    (projected, _, weight, bias), steps = saved[:4], Steps(*saved[4:])
    d_inputs, d_hidden, d_h = backward_after(steps, weight, *gradients)
    rows = d_hidden.flatten(0, 1)
    d_weight = rows.to(projected.dtype).t() @ steps.states[:-1].flatten(0, 1).to(projected.dtype)
    return d_inputs.transpose(0, 1).to(projected.dtype), d_h, d_weight.to(weight.dtype), rows.sum(0).to(bias.dtype)


_gru_after = Differentiable(
    _forward_after,
    _backward_after,
    n_inputs=4,
    reference=lambda projected, h, *weights: gru_after_reference(projected, h, HiddenWeights(*weights)),
)


class GateWeights(NamedTuple):
    """W, U and b of one line of CRT (4)."""

    input: Float[Tensor, "H D"]
    recurrent: Float[Tensor, "H H"]
    bias: Float[Tensor, " H"]


class RecurrentWeights(NamedTuple):
    """What all steps of a sequence share, made once: U_r over U_u, and U_c."""

    gates: Float[Tensor, "gates H"]
    candidate: Float[Tensor, "H H"]


class Gates(NamedTuple):
    """What CRT (4) computes on the way to the next state: r_t, u_t and c_t."""

    reset: Float[Tensor, "B H"]
    update: Float[Tensor, "B H"]
    candidate: Float[Tensor, "B H"]


class GRUCell(nn.Module):
    """One step of the GRU of CRT (4), which the paper also calls Phi = tanh (CRT Lemma 2).

        r = sigmoid(W_r x + U_r h + b_r)
        u = sigmoid(W_u x + U_u h + b_u)
        c = tanh(W_c x + U_c (r * h) + b_c)
        h' = (1 - u) * h + u * c

    The reset gate acts BEFORE the product with U_c. torch.nn.GRU computes r * (U_c h + b) instead, and its update gate
    keeps h where this one replaces it: neither its outputs nor its weights are this cell's.

    A sequence does not have to run through `forward` step by step: `project` computes the products with x for all steps
    at once, `recurrent_weights` prepares what the steps share, and `step` does the rest. `forward` is these three.

    Every weight and bias starts uniform in +-1 / sqrt(hidden_size), as in torch.nn.GRU (our choice; the paper does not
    say). The state is float64 in a float64 module, and float32 in any other and under autocast.

    Args:
        input_size: channels D of x.
        hidden_size: channels H of h.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        require_at_least(1, input_size=input_size, hidden_size=hidden_size)
        self.input_size, self.hidden_size = input_size, hidden_size
        # rows: reset, update, candidate
        self.input_weight = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.bias = nn.Parameter(torch.empty(3 * hidden_size))
        self.gate_weight = nn.Parameter(torch.empty(2 * hidden_size, hidden_size))
        self.candidate_weight = nn.Parameter(torch.empty(hidden_size, hidden_size))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden_size**-0.5), hidden_size**-0.5)

    @property
    def reset(self) -> GateWeights:
        """W_r, U_r and b_r."""
        return self._line(0, self.gate_weight[: self.hidden_size])

    @property
    def update(self) -> GateWeights:
        """W_u, U_u and b_u."""
        return self._line(1, self.gate_weight[self.hidden_size :])

    @property
    def candidate(self) -> GateWeights:
        """W_c, U_c and b_c."""
        return self._line(2, self.candidate_weight)

    def _line(self, index: int, recurrent: Tensor) -> GateWeights:
        rows = slice(index * self.hidden_size, (index + 1) * self.hidden_size)
        return GateWeights(self.input_weight[rows], recurrent, self.bias[rows])

    def project(self, x: Float[Tensor, "*steps D"]) -> Float[Tensor, "*steps projected"]:
        """Compute W x + b of the reset gate, the update gate and the candidate, side by side, for any number of steps.

        Raises:
            ValueError: x does not have `input_size` channels.
        """
        if x.shape[-1] != self.input_size:
            raise ValueError(sentence("x", kind_of(x), f"{self.input_size} channels, the cell's input_size"))
        return functional.linear(x, self.input_weight, self.bias)

    def recurrent_weights(self, dtype: torch.dtype | None = None) -> RecurrentWeights:
        """Return the matrices of the products with h in `dtype`, that of the projected x; None keeps their own."""
        return RecurrentWeights(self.gate_weight.to(dtype=dtype), self.candidate_weight.to(dtype=dtype))

    def gates(
        self, projected: Float[Tensor, "B projected"], h: Float[Tensor, "B H"], weights: RecurrentWeights
    ) -> Gates:
        """Compute r, u and c of one step from the projected input and the state h that enters it."""
        of_gates, of_candidate = projected.split([2 * self.hidden_size, self.hidden_size], -1)
        r, u = torch.addmm(of_gates, h.to(projected.dtype), weights.gates.t()).sigmoid().chunk(2, -1)
        reset = (r * h).to(projected.dtype)
        return Gates(r, u, torch.addmm(of_candidate, reset, weights.candidate.t()).tanh())

    def step(
        self, projected: Float[Tensor, "B projected"], h: Float[Tensor, "B H"], weights: RecurrentWeights
    ) -> Float[Tensor, "B H"]:
        """Compute the next state, in the precision of `h`."""
        _, u, c = self.gates(projected, h, weights)
        return torch.lerp(h, c.to(h.dtype), u.to(h.dtype))

    def forward(self, x: Float[Tensor, "B D"], h: Float[Tensor, "B H"]) -> Float[Tensor, "B H"]:
        """Compute the next state from one step's input and the state before it.

        Raises:
            ValueError: x does not have `input_size` channels, or h is not (batch of x, `hidden_size`).
        """
        projected = self.project(x)
        return self.step(projected, self.entering(h, x.shape[0]), self.recurrent_weights(projected.dtype))

    def entering(self, h: Tensor, batch: int) -> Float[Tensor, "B H"]:
        """Check a state from outside, and return it in the cell's precision, at least float32.

        Raises:
            ValueError: h is not (batch, `hidden_size`).
        """
        if h.shape != (batch, self.hidden_size):
            raise ValueError(sentence("h", kind_of(h), f"(batch, hidden) = {(batch, self.hidden_size)}"))
        return h.to(torch.promote_types(self.bias.dtype, torch.float32))


# Left to autograd, every step backwards multiplies the few sequences of a batch into a gradient as large as the
# recurrent matrices and adds it to the last one: more memory traffic than the step itself. Here the gradients that
# reach the gates are kept, and one product over all sequences and steps makes the matrices' gradients.
# Kernels take the steps themselves; elsewhere torch operations do.


_FEW = 32
"""The most sequences in bfloat16 that the kernels take: measured at 380 channels (docs/lab-log.md)."""


def gru_sequence(
    cell: GRUCell, projected: Float[Tensor, "B L projected"], h: Float[Tensor, "B H"], weights: RecurrentWeights
) -> _States:
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
    is_plain = type(cell).step is GRUCell.step and type(cell).gates is GRUCell.gates
    if is_plain and is_any_length(projected.shape[1]):
        return _any_steps(*inputs)
    if (
        not needs_gradient(*inputs)
        or not projected.shape[1]
        or not is_plain
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
) -> _States:
    """Take the same steps by `cell.step`, one after the other."""
    states = []
    for projected_step in projected.unbind(1):
        h = cell.step(projected_step, h, weights)
        states.append(h)
    y = torch.stack(states, 1) if states else projected[..., : cell.hidden_size].to(h.dtype)
    return y, h


def _kernels(projected: Tensor, h: Tensor) -> ModuleType | None:
    """Return the kernels that take the steps, `gru_steps` or `gru_triton`, or None."""
    if gru_steps.kernels_take(projected, h, "triton"):
        from recurra.ops.cells import _gru_triton as gru_triton

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
_any_steps = OneNode(
    "gru_cell_steps(Tensor projected, Tensor h, Tensor gates, Tensor candidate) -> (Tensor, Tensor)",
    lambda *inputs: _gru_sequence(*inputs, None),  # the cell is for derivatives that the node does not have
    lambda projected, h, *_: (h.new_empty((*projected.shape[:2], h.shape[1])), h.new_empty(h.shape)),
    n_inputs=4,
)
