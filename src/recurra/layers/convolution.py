"""A sum of shifted products along time, one filter a channel: a short convolution without its padding."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from recurra.checks import kind_of, require_at_least, require_layout, sentence
from recurra.layers.filters import convolve_window
from recurra.layers.norms import at_least_float32
from recurra.lengths import mask_fill
from recurra.ops._operator import (
    Differentiable,
    addresses,
    describe,
    last_dim_contiguous,
    needs_gradient,
    numba_kernels_take,
    span_of_job,
)


def shifted_products(
    x: Float[Tensor, "B L D"],
    state: Float[Tensor, "B K_1 D"],
    weight: Float[Tensor, "K D"],
    bias: Float[Tensor, " D"] | None,
) -> Float[Tensor, "B L D"]:
    """Compute y_t = bias + sum_{k < K} weight_k x_{t - K + 1 + k}, with the inputs before x in `state`.

    On a CPU a kernel does it in one walk, and another takes all gradients. It is the reference itself for other types
    and devices, for a single step without gradients, and under torch.compile, torch.func and forward derivatives.
    """
    _check(x, state, weight, bias)
    is_one_step = x.shape[1] == 1 and not needs_gradient(x, state, weight, bias)
    if is_one_step or not numba_kernels_take(x):
        return _shifted_products_reference(x, state, weight, bias)
    return _shifted_products(x, state, weight, bias)[0]


def _check(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.ndim != 3:
        raise ValueError(sentence("x", kind_of(x), "(B, L, D)"))
    (batch, _, row), kind = x.shape, (x.dtype, x.device)
    require_layout("weight", weight, (weight.shape[0], row), *kind)
    require_layout("state", state, (batch, weight.shape[0] - 1, row), *kind)
    if bias is not None:
        require_layout("bias", bias, (row,), *kind)


def _shifted_products_reference(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
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
    from recurra.layers._cpu import shifted_forward

    inputs, before, rows = last_dim_contiguous(x.detach()), state.detach().contiguous(), weight.contiguous()
    added = x.new_zeros(x.shape[2]) if bias is None else bias.detach().contiguous()
    y, (sizes, work) = x.new_empty(x.shape), _sizes(x, weight)
    shifted_forward(describe(inputs), *addresses(before, rows, added, y), *sizes, **work)
    return (y,), (x, state, weight, bias)


def _backward(gradients: tuple, saved: tuple, needs: tuple) -> tuple[Tensor | None, ...]:
    from recurra.layers._cpu import shifted_backward

    (gradient,), (x, state, weight, bias) = gradients, saved
    _check(x, state, weight, bias)  # again: hooks may have changed what was saved
    require_layout("x", x, tuple(gradient.shape), torch.float32, torch.device("cpu"))
    inputs, before, rows = last_dim_contiguous(x), state.contiguous(), weight.contiguous()
    given, (sizes, work) = gradient.contiguous(), _sizes(x, weight)
    d_x, d_state = x.new_empty(x.shape), x.new_empty(state.shape)
    sums = x.new_zeros(x.shape[0], weight.shape[0] + 1, x.shape[2])
    places = addresses(before, rows, given, d_x, d_state, sums)
    shifted_backward(describe(inputs), *places, *sizes, **work)
    found = sums.sum(0)
    return d_x, d_state, found[:-1], None if bias is None else found[-1]


_shifted_products = Differentiable(
    _forward, _backward, n_inputs=4, reference=lambda *inputs: (_shifted_products_reference(*inputs),)
)


_MANY = 16  # weights: with fewer, shifted products are faster than transforms


class ShortConvolution(nn.Module):
    """y_t = bias + sum_{k < K} weight_k x_{t - K + 1 + k}: every channel has its own filter of K = `kernel_size` steps.

    An activation is the caller's. The last weight meets the step itself, as in `torch.nn.Conv1d` over inputs padded on
    the left.

    The weights have the names, shapes (D, 1, K) and start of `torch.nn.Conv1d(D, D, K, groups=D)`, so that published
    ones load. The state is the last K - 1 counted inputs (B, K - 1, D), the oldest first: in x's own layout, a step
    appends its input and reads K rows. It is float32 or better, and so is the sum, whatever the precision of x.

    Padding may stand anywhere. With a mask the counted steps are brought together, convolved, and put back, so a mixer
    around this layer can set `skips_padding`.

    It adds K shifted products, in one kernel on a CPU, which is faster there than `torch.nn.functional.conv1d`
    (docs/lab-log.md). From 16 weights on, long pieces go through the fast Fourier transform.

    Args:
        channels: D.
        kernel_size: K, the step itself included.
        bias: add a learned number a channel.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(self, channels: int, kernel_size: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        require_at_least(1, channels=channels, kernel_size=kernel_size)
        self.kernel_size = kernel_size
        bound = kernel_size**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        state: Float[Tensor, "B K_1 D"] | None = None,
        mask: Bool[Tensor, "B L"] | None = None,
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B K_1 D"]]:
        """Convolve at least one step.

        Args:
            x: the inputs; at padding they are not read, not even NaN.
            state: the last K - 1 counted inputs before these; zeros if None.
            mask: True where a step counts.

        Returns:
            y in x's type, anything at padding, and the next state, in memory of its own.
        """
        if state is None:
            real = torch.promote_types(x.dtype, torch.float32)
            state = x.new_zeros((x.shape[0], self.kernel_size - 1, x.shape[2]), dtype=real)
        if mask is None:
            return self._of_all_steps(x, state)
        counted_first = torch.argsort((~mask).byte(), dim=1, stable=True)
        moved = _rows(at_least_float32(mask_fill(x, mask, 0)), counted_first)
        known, y = torch.cat([state, moved], 1), self._convolve(moved, state).to(x.dtype)
        last = mask.sum(1, keepdim=True) + torch.arange(self.kernel_size - 1, device=x.device)
        return _rows(y, (mask.cumsum(1) - 1).clamp(min=0)), _rows(known, last)

    def _of_all_steps(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        length, inputs, n_before = x.shape[1], at_least_float32(x), self.kernel_size - 1
        y = self._convolve(inputs, state).to(x.dtype)
        if not isinstance(length, torch.SymInt) and length >= n_before:  # without a copy of all inputs
            return y, inputs[:, length - n_before :].to(state.dtype, copy=True)
        return y, torch.cat([state, inputs], 1)[:, length:].clone()

    def _convolve(self, x: Tensor, state: Tensor) -> Tensor:
        """The outputs of x, from its steps and the K - 1 before."""
        weight = at_least_float32(self.weight)[:, 0].t()  # (K, D)
        bias = None if self.bias is None else at_least_float32(self.bias)
        if not isinstance(x.shape[1], torch.SymInt) and x.shape[1] == 1:
            y = (torch.cat([state, x], 1) * weight).sum(1, keepdim=True)
        elif self.kernel_size >= _MANY:
            y, _ = convolve_window(x, weight.flip(0), state)
        else:
            return shifted_products(x, state, weight, bias)
        return y if bias is None else y + bias


def _rows(x: Float[Tensor, "B L D"], steps: Tensor) -> Float[Tensor, "B n D"]:
    """The chosen steps of each sequence, (B, n): whole rows, which is faster than torch.gather by number."""
    offsets = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, (steps + offsets).flatten()).unflatten(0, steps.shape)
