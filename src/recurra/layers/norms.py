"""Norms, by name, with the gates beside them, and the precision in which recurrences run."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recurra.checks import require
from recurra.ops._operator import (
    Differentiable,
    addresses,
    describe,
    last_dim_contiguous,
    needs_gradient,
    numba_kernels_take,
    require_layouts,
)

NUMBERS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""The types that the kernels of layers read."""


def at_least_float32(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32, in which recurrences run and states are kept; keep other dtypes."""
    return x if x.dtype is torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))


_EPSILON = 1e-6  # as in the published code; a vector of zeros stays zeros, with a finite gradient


def unit_length(x: Float[Tensor, "*shape channels"]) -> Float[Tensor, "*shape channels"]:
    """Divide by the Euclidean length over the last dimension, in float32 or better."""
    x = at_least_float32(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, in float32 or better (arXiv 1910.07467).

    Unlike torch.nn.RMSNorm it takes float32 inputs in a bfloat16 layer, as recurrences return them, and keeps them.
    Each of `n_groups` equal groups of channels has a mean of its own; the weights are not shared between them.
    """

    def __init__(self, n_channels: int, epsilon: float = 1e-5, n_groups: int = 1) -> None:
        super().__init__()
        self.epsilon, self.n_groups = epsilon, n_groups
        self.weight = nn.Parameter(torch.ones(n_channels))

    def forward(self, x: Float[Tensor, "*shape channels"]) -> Float[Tensor, "*shape channels"]:
        """Normalise x; float16 and bfloat16 become float32."""
        x = at_least_float32(x).unflatten(-1, (self.n_groups, -1))
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)).flatten(-2) * self.weight


def gated(
    y: Float[Tensor, "B L D"],
    z: Float[Tensor, "B L D"],
    norm: RMSNorm | None = None,
    *,
    skip: tuple[Float[Tensor, "B L D"], Float[Tensor, " D"]] | None = None,
    after: bool = False,
) -> Float[Tensor, "B L D"]:
    """Return norm(y + skip u) SiLU(z), or with `after` norm((y + skip u) SiLU(z)): how a recurrence's output leaves.

    It is computed in float32 or better, and returned in z's type. A norm of n < D channels takes each n of them by
    itself, as those of a head. On a CPU a kernel does it in one walk, and another takes all gradients. It is the
    reference itself for other types and devices, for a single step without gradients, and under torch.compile,
    torch.func and forward derivatives.

    Args:
        y: what a recurrence returns.
        z: the gate before its activation.
        norm: none if None.
        skip: u and the weights, one a channel, with which it is added; both float32 or better.
        after: whether the norm comes after the gate.
    """
    y, (u, scale) = at_least_float32(y), (None, None) if skip is None else skip
    weight, options = None, (0, y.shape[-1], y.shape[-1], 0.0)
    if norm is not None:
        weight = at_least_float32(norm.weight)
        period = weight.shape[0]
        require(y.shape[-1] % period == 0, "channels of norm", period, f"a divisor of {y.shape[-1]}")
        options = (2 if after else 1, period // norm.n_groups, period, norm.epsilon)
    inputs = (y, z, u, scale, weight)
    is_one_step = y.shape[1] == 1 and not needs_gradient(*inputs)
    if is_one_step or y.dtype != torch.float32 or not numba_kernels_take(z, *NUMBERS):
        return _gated_reference(*inputs, *options)
    return _gated(*inputs, *options, z.dtype)[0]


def _gated_reference(
    y: Tensor, z: Tensor, u: Tensor | None, skip: Tensor | None, weight: Tensor | None, norm: int, group: int,
    period: int, epsilon: float,
) -> Tensor:  # fmt: skip
    """Compute the same in plain operators; `norm` is 0 for none, 1 before the gate, and 2 after it.

    A norm divides by the root mean square of `group` channels; its weights start again after `period` channels.
    """
    s, gate = y if u is None or skip is None else y + skip * u, functional.silu(at_least_float32(z))
    s = s * gate if norm == 2 else s
    if norm:
        s = s.unflatten(-1, (-1, group))
        s = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + epsilon)
        s = s.flatten(-2) if weight is None else s.flatten(-2) * weight.repeat(y.shape[-1] // weight.shape[0])
    return (s if norm == 2 else s * gate).to(z.dtype)


_ROWS = 64  # of a job: a fixed number, so that gradients of weights do not depend on the number of threads


def _check(
    y: Tensor, z: Tensor, u: Tensor | None, skip: Tensor | None, weight: Tensor | None, period: int, dtype: torch.dtype
) -> None:
    steps, row, cpu = tuple(y.shape), tuple(y.shape[2:]), torch.device("cpu")
    require_layouts(dtype, cpu, z=(z, steps))
    of_norm = {"norm.weight": (weight, (period,))}
    require_layouts(torch.float32, cpu, y=(y, steps), u=(u, steps), skip=(skip, row), **of_norm)


def _prepared(y, z, u, skip, weight, group, epsilon):  # type: ignore[no-untyped-def]
    """What both kernels take: strided and dense inputs, memory that lasts as long, sizes."""
    strided = [None if x is None else last_dim_contiguous(x.detach().resolve_neg()) for x in (y, u, z)]
    dense = [None if x is None else x.detach().resolve_neg().contiguous() for x in (skip, weight)]
    numbers, n_jobs = y.new_tensor([1 / group, epsilon]), -(-y.shape[0] * y.shape[1] // _ROWS)
    y_, u_, z_ = ((0, 0, 0) if x is None else describe(x) for x in strided)
    skip_, weight_ = (0 if x is None else x.data_ptr() for x in dense)
    scratch = y.new_empty(n_jobs, 2, group)
    return (y_, u_, skip_, z_, weight_, numbers.data_ptr()), scratch, (strided, dense, numbers)


def _forward(keep, y, z, u, skip, weight, norm, group, period, epsilon, dtype):  # type: ignore[no-untyped-def]
    from recurra.layers._cpu import gated_kernels

    _check(y, z, u, skip, weight, period, dtype)
    given, scratch, _alive = _prepared(y, z, u, skip, weight, group, epsilon)
    out, scales = torch.empty_like(z, memory_format=torch.contiguous_format), y.new_empty(y.numel() // group)
    gated_kernels(NUMBERS[dtype]).forward(
        *given, *addresses(out, scales, scratch), *y.shape, period, group, norm, _ROWS, jobs=len(scratch),
        work=y.numel(),
    )  # fmt: skip
    return (out,), (y, z, u, skip, weight, scales)


def _backward(gradients, saved, needs, norm, group, period, epsilon, dtype):  # type: ignore[no-untyped-def]
    from recurra.layers._cpu import gated_kernels

    (gradient,), (*inputs, scales) = gradients, saved
    y, z, u, skip, weight = inputs
    of_scales = scales, (gradient.numel() // group,)
    require_layouts(torch.float32, torch.device("cpu"), y=(y, gradient.shape), scales=of_scales)
    _check(y, z, u, skip, weight, period, dtype)  # again: hooks may have changed what was saved
    given, scratch, _alive = _prepared(y, z, u, skip, weight, group, epsilon)
    g, scales = gradient.resolve_neg().contiguous(), scales.contiguous()
    sums = y.new_zeros(len(scratch), 2, y.shape[2])
    d_y, d_z = y.new_empty(y.shape), z.new_empty(z.shape)
    d_u = None if u is None else y.new_empty(y.shape)
    gated_kernels(NUMBERS[dtype]).backward(
        *given, *addresses(g, scales, d_y), 0 if d_u is None else d_u.data_ptr(),
        *addresses(d_z, sums, scratch), *y.shape, period, group, norm, _ROWS, jobs=len(scratch),
        work=y.numel(),
    )  # fmt: skip
    of_weight, of_skip = sums.sum(0)
    of_weight = None if weight is None else of_weight.view(-1, period).sum(0)
    return d_y, d_z, d_u, None if skip is None else of_skip, of_weight


_gated = Differentiable(
    _forward, _backward, n_inputs=5, reference=lambda *arguments: (_gated_reference(*arguments[:-1]),)
)


NORMS: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
"""LayerNorm (Ba et al., arXiv 1607.06450), and RMSNorm, without mean and shift (Zhang and Sennrich, arXiv 1910.07467);
both are called as `norm(n_channels, eps=...)`."""
