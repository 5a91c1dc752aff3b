"""Positions: rotations of queries and keys (RoPE, xPos), Mamba-3's B and C turned by angles, sinusoids of distances."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from recurra.checks import kind_of, sentence
from recurra.ops._operator import (
    Differentiable,
    addresses,
    is_batch,
    needs_gradient,
    numba_kernels_take,
    require_layouts,
    transforms_are_active,
    usable_threads,
)


def phases(positions: Int[Tensor, "*n"], n_channels: int, base: float = 10000.0) -> Float[Tensor, "*n pairs"]:
    """Compute theta_i n in radians and float64, with theta_i = base^(-2i / n_channels) for channel pair i.

    In float32 the phase at position 10^6 would be off by up to 0.06 radians. The number of channels is even.
    """
    exponents = torch.arange(0, n_channels, 2, dtype=torch.float64, device=positions.device) / n_channels
    return positions.double()[..., None] * base**-exponents


def rotate(x: Float[Tensor, "*batch d"], angles: Float[Tensor, "*#batch pairs"]) -> Float[Tensor, "*batch d"]:
    """Multiply x by exp(i angle), with channels 2i and 2i + 1 as the complex number x_2i + i x_2i+1.

    So RoPE and xPos rotate queries and keys by their positions (arXiv 2212.10554, section 2). The product of two
    rotated vectors then depends only on the difference of their angles:
    rotate(q, n theta) . rotate(k, m theta) = Re(q conj(k) exp(i (n - m) theta)).
    """
    # programs are exported without complex numbers
    is_eager = not torch.compiler.is_compiling() and not transforms_are_active()
    trains = torch.is_grad_enabled() and x.requires_grad and not angles.requires_grad
    if is_eager and trains and x.dtype in (torch.float32, torch.float64) and x.numel():
        rotated: Tensor = _Rotation.apply(x, torch.polar(torch.ones_like(angles), angles).to(x.dtype.to_complex()))
        return rotated
    return _by_parts(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


def _by_parts(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    re, im = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)  # vmap may have no rule for unflatten
    return torch.stack([re * cos - im * sin, re * sin + im * cos], -1).reshape(x.shape)


class _Rotation(torch.autograd.Function):
    """One product of complex numbers each way, an eighth of the time of the formula in real numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: Tensor) -> Tensor:
        ctx.save_for_backward(unit)
        if x.stride(-1) != 1 or any(n % 2 for n in (*x.stride()[:-1], x.storage_offset())):
            x = x.clone(memory_format=torch.contiguous_format)  # pairs must lie where complex numbers can
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * unit).flatten(-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (unit,) = ctx.saved_tensors
        if is_batch(gradient):
            return _by_parts(gradient, unit.real, -unit.imag), None
        return _Rotation.apply(gradient, unit.conj().resolve_conj()), None


def sinusoids(
    n_distances: int, d_model: int, *, like: Tensor, clamp_len: int | None = None
) -> Float[Tensor, "n_distances d_model"]:
    """Encode the distances n_distances - 1, ..., 1, 0, one per row (Transformer-XL, arXiv 1901.02860, section 3.3).

    The row of distance d is sin(d f_0), ..., sin(d f_k), cos(d f_0), ..., cos(d f_k) with f_i = 10000^(-2i / d_model):
    all sines, then all cosines, as in Transformer-XL's code. d_model is even; distances beyond `clamp_len` are encoded
    as this one; the result has the device and dtype of `like`.
    """
    # The frequencies are rounded to float32 in every precision, because the published weights were trained that way.
    exponents = torch.arange(0, d_model, 2, dtype=torch.float32, device=like.device) / d_model
    dtype = torch.promote_types(like.dtype, torch.float32)
    distances = torch.arange(n_distances - 1, -1, -1, dtype=dtype, device=like.device)
    if clamp_len is not None:
        distances = distances.clamp(max=clamp_len)
    angles = torch.outer(distances, (1.0 / 10000.0**exponents).to(dtype))
    return torch.cat([angles.sin(), angles.cos()], -1).to(like.dtype)


class _Turned(NamedTuple):
    """What `turned` returns."""

    b: Float[Tensor, "B L H n"]  # turned and multiplied by its scale
    c: Float[Tensor, "B L H n"]  # turned
    dots: Float[Tensor, "B L H 1"]  # B . C, as turning does not change it


def turned(
    b: Float[Tensor, "B L H n"],
    c: Float[Tensor, "B L H n"],
    angles: Float[Tensor, "B L H pairs"],
    scale: Float[Tensor, "B L H 1"],
) -> _Turned:
    """Turn the first pairs of channels of B and C by the same angles, in radians; the other channels stay.

    On a CPU one kernel does all, and one takes all gradients. It is the reference itself for other types and devices,
    for a single step without gradients, and under torch.compile, torch.func and forward derivatives.
    """
    inputs = (b, c, angles, scale)
    _check(*inputs)
    is_one_step = b.shape[1] == 1 and not needs_gradient(*inputs)
    if is_one_step or not numba_kernels_take(b):
        return _turned_reference(*inputs)
    return _Turned(*_turned(*inputs))


def _check(b: Tensor, c: Tensor, angles: Tensor, scale: Tensor) -> None:
    shape, kind = b.shape, (b.dtype, b.device)
    if 2 * angles.shape[-1] > shape[-1]:
        raise ValueError(sentence("angles", kind_of(angles), f"at most one for two of {shape[-1]} channels"))
    of_angles = angles, (*shape[:-1], angles.shape[-1])
    require_layouts(*kind, c=(c, shape), angles=of_angles, scale=(scale, (*shape[:-1], 1)))


def _turned_reference(b: Tensor, c: Tensor, angles: Tensor, scale: Tensor) -> _Turned:
    """Compute the same in plain operators."""
    return _Turned(turn(b, angles) * scale, turn(c, angles), (b * c).sum(-1, keepdim=True))


def turn(x: Float[Tensor, "*batch n"], angles: Float[Tensor, "*#batch pairs"]) -> Float[Tensor, "*batch n"]:
    """Rotate the first pairs of channels of x, one for each angle."""
    n_turning = 2 * angles.shape[-1]
    turning, still = x.split([n_turning, x.shape[-1] - n_turning], -1)
    return torch.cat([rotate(turning, angles), still], -1)


def _sizes(b: Tensor, angles: Tensor) -> tuple[tuple[int, ...], dict[str, int]]:
    size, turning = b.shape[-1], 2 * angles.shape[-1]
    rows = b.numel() // size
    span = -(-rows // usable_threads())
    return (rows, size, turning, span), {"jobs": -(-rows // span), "work": b.numel()}


def _plain(x: Tensor) -> Tensor:
    """What lies at an address has its sign: a Function that takes addresses meets views that torch negates later."""
    return x.resolve_neg().contiguous()


def _forward(keep: bool, b: Tensor, c: Tensor, angles: Tensor, scale: Tensor) -> tuple[tuple, tuple]:
    from recurra.layers._cpu import turned_forward

    dense = [_plain(x.detach()) for x in (b, c, scale)]
    unit = torch.stack([angles.detach().cos(), angles.detach().sin()], -1)
    results = tuple(torch.empty_like(x) for x in dense)
    sizes, work = _sizes(b, angles)
    turned_forward(*addresses(dense[0], dense[1], unit, dense[2], *results), *sizes, **work)
    return results, (b, c, angles, scale, unit)


def _backward(gradients: tuple, saved: tuple, needs: tuple) -> tuple[Tensor | None, ...]:
    from recurra.layers._cpu import turned_backward

    b, c, angles, scale, unit = saved
    _check(b, c, angles, scale)  # again: hooks may have changed what was saved
    like = (torch.float32, torch.device("cpu"))
    given = [b.new_zeros(x.shape) if g is None else g for g, x in zip(gradients, (b, c, scale))]
    require_layouts(*like, unit=(unit, (*angles.shape, 2)), b=(b, given[0].shape))
    dense, given = list(map(_plain, (b, c, unit, scale))), list(map(_plain, given))
    d_b, d_c, d_pairs, d_scale = (torch.empty_like(x) for x in dense)
    sizes, work = _sizes(b, angles)
    turned_backward(*addresses(*dense, *given, d_b, d_c, d_pairs, d_scale), *sizes, **work)
    return d_b, d_c, d_pairs[..., 1], d_scale


_turned = Differentiable(_forward, _backward, n_inputs=4, reference=_turned_reference)
