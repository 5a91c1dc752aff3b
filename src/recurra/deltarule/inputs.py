"""The checks of what comes in: types, dimensions, devices and shapes of q, k, v, a, b and the state."""

import torch
from torch import Tensor

from recurra.checks import kind_of, require_tensor, sentence
from recurra.gateloop.inputs import check_shape


def check_inputs(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None) -> None:
    """Refuse what does not make a delta rule.

    Args:
        q, k: (B, L, H, d_qk).
        v: (B, L, H, d_v).
        a, b: (B, L, H) or (B, L, H, 1).
        state: (B, H, d_qk, d_v), or None.

    Raises:
        TypeError: one is not a tensor of real floating-point numbers.
        ValueError: one has another shape, or is on another device than q.
    """
    require_tensor("q", q)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_numbers(name, tensor, q.device, "(B, L, H, d)", 4)
    steps = tuple(q.shape[:3])
    check_shape("k", k, tuple(q.shape))
    check_shape("v", v, (*steps, v.shape[3]))
    for name, tensor in (("a", a), ("b", b)):
        _check_numbers(name, tensor, q.device, "(B, L, H) or (B, L, H, 1)", 3, 4)
        check_shape(name, tensor, steps, (*steps, 1))
    if state is not None:
        _check_numbers("state", state, q.device, "(B, H, d_qk, d_v)", 4)
        check_shape("state", state, (steps[0], *q.shape[2:], v.shape[3]))


def _check_numbers(name: str, tensor: Tensor, device: torch.device, expected: str, *dimensions: int) -> None:
    require_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(sentence(name, kind_of(tensor), "real floating-point numbers"))
    if tensor.dim() not in dimensions:
        raise ValueError(sentence(name, kind_of(tensor), expected))
    if tensor.device != device:
        raise ValueError(sentence(name, kind_of(tensor), f"a tensor on {device}, as q"))
