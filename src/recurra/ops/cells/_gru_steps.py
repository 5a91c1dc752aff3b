"""The GRUs' CPU kernels on tensors: what they take, and memory for what they make.

Tensors with an L in front have time first, as the kernels walk. All is float32.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from recurra.checks import require_layout
from recurra.ops._operator import addresses, has_numbers, usable_threads
from recurra.ops._toolkit.backends import choose_backend

if TYPE_CHECKING:
    from recurra.ops._toolkit.launch import Kernel

_PANEL = 64
_TYPES = {"numba": (torch.float32, torch.bfloat16), "triton": (torch.float32, torch.bfloat16, torch.float16)}
_DEVICES = {"numba": "cpu", "triton": "cuda"}


class Steps(NamedTuple):
    """What a backward pass needs of all steps: gates r and u side by side, candidates, states with the first in front.

    `hidden` is the product with the states for a reset gate that acts after it, and r h for one that acts before it.
    """

    ru: Float[Tensor, "L B gates"]
    c: Float[Tensor, "L B H"]
    hidden: Float[Tensor, "L B hidden"]
    states: Float[Tensor, "all_steps B H"]


def kernels_take(projected: Tensor, h: Tensor, backend: str = "numba") -> bool:
    """Whether a backend's kernels take inputs and states of these types, on this device."""
    fits = projected.dtype in _TYPES[backend] and h.dtype == torch.float32 and bool(projected.numel())
    fits = fits and projected.device.type == _DEVICES[backend] and has_numbers(projected)
    return fits and choose_backend("auto", projected.device) == backend


def in_panels(matrix: Float[Tensor, "*many inputs outputs"]) -> Float[Tensor, "*many panels inputs 64"]:
    """Lay matrices out in panels of 64 columns, the last one filled up with zeros."""
    padded = functional.pad(matrix.detach().float(), (0, -matrix.shape[-1] % _PANEL))
    return padded.unflatten(-1, (-1, _PANEL)).transpose(-3, -2).contiguous()


def check_backward(steps: Steps, d_y: Tensor, d_last: Tensor, **weights: Tensor) -> None:
    """Refuse what does not fit `steps` in a backward pass; each of the weights has so many outputs, times H."""
    (length, batch, size), kind = steps.c.shape, (steps.c.dtype, steps.c.device)
    require_layout("steps.ru", steps.ru, (length, batch, 2 * size), *kind)
    require_layout("steps.states", steps.states, (length + 1, batch, size), *kind)
    for name, weight in weights.items():
        n_outputs = {"gates": 2, "candidate": 1, "all": 3}[name] * size
        require_layout(f"the weight of the {name}", weight, (n_outputs, size), weight.dtype, kind[1])
    require_layout("d_y", d_y, (batch, length, size), d_y.dtype, kind[1])
    require_layout("d_last", d_last, (batch, size), d_last.dtype, kind[1])


def _by_time(x: Float[Tensor, "B L n"]) -> Float[Tensor, "L B n"]:
    return x.detach().transpose(0, 1).float().contiguous()


def _make(length: int, h: Tensor, *sizes: int) -> list[Tensor]:
    return [h.new_empty(length, h.shape[0], size, dtype=torch.float32) for size in sizes]


def _start(length: int, h: Float[Tensor, "B H"]) -> Float[Tensor, "all_steps B H"]:
    (states,) = _make(length + 1, h, h.shape[1])
    states[0] = h
    return states


def _run(kernel: "Kernel", steps: Steps, *tensors: Tensor) -> None:
    """Call a kernel with the addresses of dense tensors, which this call keeps alive."""
    length, batch, size = steps.c.shape
    span = -(-batch // usable_threads())
    work = 3 * length * batch * size * size
    kernel(*addresses(*tensors), length, batch, size, span, jobs=-(-batch // span), work=work)


def forward(
    projected: Float[Tensor, "B L projected"], h: Float[Tensor, "B H"], of_gates: Tensor, of_candidate: Tensor
) -> Steps:
    """Take the steps of `cells.GRUCell`: U_r over U_u, and U_c, multiply h and r h."""
    from recurra.ops.cells._cpu import gru_forward

    length, size = projected.shape[1], h.shape[1]
    ru, c, reset = _make(length, h, 2 * size, size, size)
    steps = Steps(ru, c, reset, _start(length, h))
    weights = [in_panels(w.t()) for w in (of_gates, of_candidate)]
    _run(gru_forward, steps, _by_time(projected), *weights, *steps)
    return steps


def forward_after(
    projected: Float[Tensor, "B L projected"], h: Float[Tensor, "B H"], weight: Tensor, bias: Tensor
) -> Steps:
    """Take the steps of `torch.nn.GRU`: the weight (3 H, H) and its bias make `hidden` from h."""
    from recurra.ops.cells._cpu import gru_after_forward

    (batch, length, _), size = projected.shape, h.shape[1]
    # a copy in any case: the kernel writes into it, and one step of one sequence needs none to be contiguous
    hidden = bias.detach().float().expand(length, batch, -1).clone(memory_format=torch.contiguous_format)
    ru, c = _make(length, h, 2 * size, size)
    steps = Steps(ru, c, hidden, _start(length, h))
    _run(gru_after_forward, steps, _by_time(projected), in_panels(weight.t()), *steps)
    return steps


def _gradients_in(steps: Steps, d_y: Tensor | None, d_last: Tensor | None, **weights: Tensor) -> tuple[Tensor, Tensor]:
    """Check what a backward pass was given, and return d_y by time and a copy of d_last, to be changed."""
    first = steps.states.new_zeros(steps.c.shape[1:])
    require_layout("steps.c", steps.c, tuple(steps.c.shape), torch.float32, torch.device("cpu"))
    d_y = first.expand(len(steps.c), *first.shape).transpose(0, 1) if d_y is None else d_y
    d_last = first if d_last is None else d_last
    check_backward(steps, d_y, d_last, **weights)
    return _by_time(d_y), d_last.float().clone(memory_format=torch.contiguous_format)


def backward(
    steps: Steps, of_gates: Tensor, of_candidate: Tensor, d_y: Tensor | None, d_last: Tensor | None
) -> tuple[Float[Tensor, "L B projected"], Float[Tensor, "B H"]]:
    """Return the gradients of the projected inputs, which are those of the products with U too, and of the state."""
    from recurra.ops.cells._cpu import gru_backward

    d_y, d_h = _gradients_in(steps, d_y, d_last, gates=of_gates, candidate=of_candidate)
    (d_inputs,), scratch = _make(len(steps.c), d_h, 3 * d_h.shape[1]), torch.empty_like(d_h)
    ru, c, _, states = (x.contiguous() for x in steps)
    panels = [in_panels(w) for w in (of_gates, of_candidate)]
    _run(gru_backward, steps, d_y, ru, c, states, *panels, d_inputs, d_h, scratch)
    return d_inputs, d_h


def backward_after(
    steps: Steps, weight: Tensor, d_y: Tensor | None, d_last: Tensor | None
) -> tuple[Float[Tensor, "L B projected"], Float[Tensor, "L B hidden"], Float[Tensor, "B H"]]:
    """Return the gradients of the projected inputs, of `hidden` and of the state."""
    from recurra.ops.cells._cpu import gru_after_backward

    d_y, d_h = _gradients_in(steps, d_y, d_last, all=weight)
    length, batch, size = steps.c.shape
    require_layout("steps.hidden", steps.hidden, (length, batch, 3 * size), torch.float32, torch.device("cpu"))
    d_inputs, d_hidden = _make(length, d_h, 3 * size, 3 * size)
    tensors = [x.contiguous() for x in steps]
    _run(gru_after_backward, steps, d_y, *tensors, in_panels(weight), d_inputs, d_hidden, d_h)
    return d_inputs, d_hidden, d_h
