"""A sum of shifted products along time, one filter a channel: a short convolution without its padding."""

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.checks import kind_of, require_layout, sentence
from recurra.kernels.operator import Differentiable, needs_gradient, numba_kernels_take
from recurra.kernels.tensors import addresses, describe, span_of_job, with_neighbouring_channels


def shifted_products(
    x: Float[Tensor, "B L D"],
    state: Float[Tensor, "B K_1 D"],
    weight: Float[Tensor, "K D"],
    bias: Float[Tensor, " D"] | None,
) -> Float[Tensor, "B L D"]:
    """Compute y_t = bias + sum_{k < K} weight_k x_{t - K + 1 + k}, with the inputs before x in `state`.

    On a CPU a kernel does it in one walk, and another takes all gradients. It is the reference itself for other types
    and devices, for a single step without gradients, and under torch.compile, torch.func and forward derivatives.

    Raises:
        ValueError: a tensor has another shape than above, or another type or device than x.
    """
    _check(x, state, weight, bias)
    is_one_step = x.shape[1] == 1 and not needs_gradient(x, state, weight, bias)
    if is_one_step or not numba_kernels_take(x):
        return shifted_products_reference(x, state, weight, bias)
    return _shifted_products(x, state, weight, bias)[0]


def _check(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.ndim != 3:
        raise ValueError(sentence("x", kind_of(x), "(B, L, D)"))
    (batch, _, row), kind = x.shape, (x.dtype, x.device)
    require_layout("weight", weight, (weight.shape[0], row), *kind)
    require_layout("state", state, (batch, weight.shape[0] - 1, row), *kind)
    if bias is not None:
        require_layout("bias", bias, (row,), *kind)


def shifted_products_reference(
    x: Float[Tensor, "B L D"],
    state: Float[Tensor, "B K_1 D"],
    weight: Float[Tensor, "K D"],
    bias: Float[Tensor, " D"] | None,
) -> Float[Tensor, "B L D"]:
    """Compute the same in plain operators."""
    known, length = torch.cat([state, x], 1), x.shape[1]
    weight = weight.contiguous()  # the products below read rows of D numbers
    first, *shifted = (known[:, k : k + length] for k in range(weight.shape[0]))
    y = first * weight[0] if bias is None else torch.addcmul(bias, first, weight[0])
    for k, inputs in enumerate(shifted, 1):
        y = torch.addcmul(y, inputs, weight[k])
    return y


def _sizes(x: Tensor, weight: Tensor) -> tuple[tuple[int, ...], dict[str, int]]:
    batch, length, row = x.shape
    span = span_of_job(row, batch)
    work = weight.shape[0] * x.numel()
    return (batch, length, weight.shape[0], row, span), {"jobs": batch * -(-row // span), "work": work}


def _forward(keep: bool, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[tuple, tuple]:
    from recurra.layers.shifted_products_kernels import shifted_products_kernels

    inputs, before, rows = with_neighbouring_channels(x.detach()), state.detach().contiguous(), weight.contiguous()
    added = x.new_zeros(x.shape[2]) if bias is None else bias.detach().contiguous()
    y, (sizes, work) = x.new_empty(x.shape), _sizes(x, weight)
    shifted_products_kernels().forward(describe(inputs), *addresses(before, rows, added, y), *sizes, **work)
    return (y,), (x, state, weight, bias)


def _backward(gradients: tuple, saved: tuple, needs: tuple) -> tuple[Tensor | None, ...]:
    from recurra.layers.shifted_products_kernels import shifted_products_kernels

    (gradient,), (x, state, weight, bias) = gradients, saved
    _check(x, state, weight, bias)  # again: hooks may have changed what was saved
    require_layout("x", x, tuple(gradient.shape), torch.float32, torch.device("cpu"))
    inputs, before, rows = with_neighbouring_channels(x), state.contiguous(), weight.contiguous()
    given, (sizes, work) = gradient.contiguous(), _sizes(x, weight)
    d_x, d_state = x.new_empty(x.shape), x.new_empty(state.shape)
    sums = x.new_zeros(x.shape[0], weight.shape[0] + 1, x.shape[2])
    places = addresses(before, rows, given, d_x, d_state, sums)
    shifted_products_kernels().backward(describe(inputs), *places, *sizes, **work)
    found = sums.sum(0)
    return d_x, d_state, found[:-1], None if bias is None else found[-1]


_shifted_products = Differentiable(
    _forward, _backward, n_inputs=4, reference=lambda *inputs: (shifted_products_reference(*inputs),)
)
