"""B and C of Mamba-3, turned by the angles of their steps, and the product of each B with its C."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from recurra.checks import kind_of, require_layout, sentence
from recurra.layers.positions import rotate
from recurra.ops._operator import Differentiable, addresses, needs_gradient, numba_kernels_take, usable_threads


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
    require_layout("c", c, shape, *kind)
    require_layout("angles", angles, (*shape[:-1], angles.shape[-1]), *kind)
    require_layout("scale", scale, (*shape[:-1], 1), *kind)


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
    require_layout("unit", unit, (*angles.shape, 2), *like)
    given = [b.new_zeros(x.shape) if g is None else g for g, x in zip(gradients, (b, c, scale))]
    require_layout("b", b, tuple(given[0].shape), *like)
    dense, given = list(map(_plain, (b, c, unit, scale))), list(map(_plain, given))
    d_b, d_c, d_pairs, d_scale = (torch.empty_like(x) for x in dense)
    sizes, work = _sizes(b, angles)
    turned_backward(*addresses(*dense, *given, d_b, d_c, d_pairs, d_scale), *sizes, **work)
    return d_b, d_c, d_pairs[..., 1], d_scale


_turned = Differentiable(_forward, _backward, n_inputs=4, reference=_turned_reference)
