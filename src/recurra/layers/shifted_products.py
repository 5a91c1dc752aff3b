"""A sum of shifted products along time, one filter a channel: a short convolution without its padding."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.checks import kind_of, require_layout, sentence
from recurra.kernels.operators import are_batched, differentiable_gradients, float32_kernels_take
from recurra.kernels.tensors import describe, span_of_job, with_neighbouring_channels


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
    needs_gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, state, weight, bias)
    )
    if (x.shape[1] == 1 and not needs_gradient) or not float32_kernels_take(x):
        return shifted_products_reference(x, state, weight, bias)
    y: Tensor = _ShiftedProducts.apply(x, state, weight, bias)
    return y


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


class _ShiftedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from recurra.layers.shifted_products_kernels import shifted_products_kernels

        ctx.save_for_backward(x, state, weight, bias)
        inputs, before, rows = with_neighbouring_channels(x.detach()), state.detach().contiguous(), weight.contiguous()
        added = x.new_zeros(x.shape[2]) if bias is None else bias.detach().contiguous()
        y, (sizes, work) = x.new_empty(x.shape), _sizes(x, weight)
        addresses = (t.data_ptr() for t in (before, rows, added, y))
        shifted_products_kernels().forward(describe(inputs), *addresses, *sizes, **work)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, state, weight, bias = ctx.saved_tensors
        # gradients that will be differentiated again, or a batch of them, which has no address
        if torch.is_grad_enabled() or are_batched(gradient):
            reference = lambda *inputs: (shifted_products_reference(*inputs),)  # noqa: E731
            return differentiable_gradients(reference, (x, state, weight, bias), (gradient,))
        from recurra.layers.shifted_products_kernels import shifted_products_kernels

        _check(x, state, weight, bias)  # again: hooks may have changed what was saved
        require_layout("x", x, tuple(gradient.shape), torch.float32, torch.device("cpu"))
        inputs, before, rows = with_neighbouring_channels(x), state.contiguous(), weight.contiguous()
        given, (sizes, work) = gradient.contiguous(), _sizes(x, weight)
        d_x, d_state = x.new_empty(x.shape), x.new_empty(state.shape)
        sums = x.new_zeros(x.shape[0], weight.shape[0] + 1, x.shape[2])
        addresses = (t.data_ptr() for t in (before, rows, given, d_x, d_state, sums))
        shifted_products_kernels().backward(describe(inputs), *addresses, *sizes, **work)
        found = sums.sum(0)
        return d_x, d_state, found[:-1], None if bias is None else found[-1]
