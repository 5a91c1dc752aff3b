"""Causality for infinities and NaN. Times the zeros of a mask they are NaN, and reach steps that never see them.

What computes by masked products leaves out the steps that have one, and marks with NaN what would have seen them:
later results in the forward pass, the gradients of earlier inputs in the backward pass. No one looks at steps in a
trace or under torch.func.
"""

import cmath
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from recurra.ops._operator import has_numbers, transforms_are_active


def nonfinite_steps(*inputs: Shaped[Tensor, "B L ..."]) -> Bool[Tensor, "B L"] | None:
    """Mark the steps at which some input has an infinity or NaN; None if there are none.

    None in a trace and under torch.func, too. To look at other devices than the CPU first would be to wait for them.
    """
    if transforms_are_active() or not has_numbers(*inputs):
        return None
    if inputs[0].device.type == "cpu" and all(cmath.isfinite(x.detach().sum().item()) for x in inputs):
        return None
    return torch.stack([~x.detach().isfinite().flatten(2).all(-1) for x in inputs]).any(0)


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reached: Callable[[Tensor], Sequence[Tensor]], y: Tensor, *inputs: Tensor) -> Tensor:
        ctx.reached, ctx.kinds = reached, [(x.shape, x.dtype) for x in inputs]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        bad = nonfinite_steps(dy)
        if bad is None:
            return None, dy, *(None for _ in ctx.kinds)
        zeros = (dy.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.kinds)
        marked = (x.masked_fill(mark, torch.nan) for x, mark in zip(zeros, ctx.reached(bad)))
        return None, dy.masked_fill(bad.reshape(*bad.shape, *(1,) * (dy.dim() - 2)), 0), *marked


def keep_apart(y: Tensor, reached: Callable[[Tensor], Sequence[Tensor]], *inputs: Tensor) -> Tensor:
    """Return y (B, L, ...), but with a backward pass whose products leave out steps with an infinite gradient or NaN.

    `reached` tells from the marks (B, L) of such steps where the gradients of the `inputs` of y become NaN.
    """
    if not y.requires_grad or transforms_are_active() or not has_numbers(y):
        return y
    kept: Tensor = _Apart.apply(reached, y, *inputs)
    return kept


def up_to_last(bad: Bool[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    """Mark all steps up to the last one that is marked."""
    return bad.flip(1).cummax(1).values.flip(1)


def causal_in_nonfinite(
    n_inputs: int,
) -> Callable[[Callable[..., tuple[Tensor, Tensor]]], Callable[..., tuple[Tensor, Tensor]]]:
    """Make a mode of masked products causal: from queries, `n_inputs` - 1 more over time, and a state to (y, last).

    From the first step of a sequence at which an input has an infinity or NaN, results are NaN; up to the last one at
    which the gradient of y has one, gradients are, those of queries at such steps alone.
    """

    def earlier(bad: Tensor) -> list[Tensor]:
        at = bad[:, :, None, None]
        before = up_to_last(bad)[:, :, None, None]
        return [at, *[before] * (n_inputs - 1), before[:, :1]]

    def wrap(mode: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        @functools.wraps(mode)
        def run(*arguments: Any) -> tuple[Tensor, Tensor]:
            inputs, (h, *rest) = arguments[:n_inputs], arguments[n_inputs:]
            bad = nonfinite_steps(*inputs)
            if bad is None:
                y, last = mode(*arguments)
                return keep_apart(y, earlier, *inputs, h), last
            bad = bad.cummax(1).values[:, :, None, None]
            finite = [x.masked_fill(bad, 0) for x in inputs]
            y, last = mode(*finite, h, *rest)
            y = keep_apart(y, earlier, *finite, h)
            return y.masked_fill(bad, torch.nan), last.masked_fill(bad[:, -1:], torch.nan)

        return run

    return wrap
