"""A laid-out matrix times a few vectors, as a torch operator, so that a traced model can contain it.

    recurra::decoding_linear    y = scale (W x) + bias      x (..., n_in) float32, scale, bias (n_out)

W is float32 (n_out, n_in), or bfloat16, int8 or int4 in panels (see `panels`). For int8 and int4, x is rounded (see
`rounded_inputs`). There is no derivative: asking for one
raises.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from recurra.checks import kind_of, require_layout, sentence
from recurra.decoding.instructions import KINDS
from recurra.decoding.panels import GROUP, GROUP_BYTES, PANEL, QUAD
from recurra.kernels.operator import Operator
from recurra.kernels.tensors import usable_threads

_NUMBERS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8", torch.uint8: "int4"}
_FORMS = {"float32": (), "bfloat16": (PANEL,), "int8": (PANEL, QUAD), "int4": (GROUP_BYTES,)}
"""What follows the first two dimensions of laid-out weights."""
_TOGETHER = 256
"""Most vectors that meet the weights in one pass: their numbers and sums stay in the cache."""


class LaidOut(NamedTuple):
    """What laid-out weights are: a number of `KINDS`, inputs, outputs."""

    kind: int
    n_in: int
    n_out: int


def describe_weights(weight: Tensor, n_in: int, n_out: int) -> LaidOut:
    """Tell what weights are; `n_in` and `n_out` decide where their last panel or group may be full or not.

    Raises:
        ValueError: they are not laid out.
    """
    numbers = _NUMBERS.get(weight.dtype)
    rest = _FORMS.get(str(numbers))
    fits_form = rest is not None and weight.dim() == 2 + len(rest) and weight.shape[2:] == rest
    if numbers is None or not fits_form or not weight.is_contiguous():
        came, fits = kind_of(weight), f"contiguous {', '.join(_NUMBERS.values())}, laid out"
        raise ValueError(sentence("weight", came, fits))
    if numbers == "float32":
        return LaidOut(KINDS[numbers], weight.shape[1], weight.shape[0])
    n_panels, length = weight.shape[:2]
    n_out = n_out if -(-n_out // PANEL) == n_panels else n_panels * PANEL
    together = {"bfloat16": 1, "int8": QUAD, "int4": GROUP}[numbers]
    return LaidOut(KINDS[numbers], n_in if -(-n_in // together) == length else length * together, n_out)


def _check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> None:
    laid_out = describe_weights(weight, x.shape[-1] if x.dim() else 0, scale.numel())
    require_layout("x", x, (*x.shape[:-1], laid_out.n_in), torch.float32, weight.device)
    for name, tensor in (("scale", scale), ("bias", bias)):
        require_layout(name, tensor, (laid_out.n_out,), torch.float32, weight.device)
        if not tensor.is_contiguous():
            raise ValueError(sentence(name, f"a view with strides {tensor.stride()}", "a contiguous tensor"))


def _run(y: Tensor, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> None:
    from recurra.decoding.matvec_kernels import matvec_kernel, multiply_share, room_bytes

    if y.numel() == 0:
        return
    kind, n_in, n_out = describe_weights(weight, x.shape[-1], scale.numel())
    x = x.contiguous()
    vectors, jobs = y.numel() // n_out, min(usable_threads(), -(-n_out // PANEL))
    room_size = room_bytes(min(vectors, _TOGETHER), n_in)
    room = x.new_zeros(jobs * room_size // 4)
    for first in range(0, vectors, _TOGETHER):
        matvec_kernel()(
            *(multiply_share.address, kind, weight.data_ptr(), scale.data_ptr(), bias.data_ptr()),
            *(x.data_ptr() + 4 * first * n_in, y.data_ptr() + 4 * first * n_out, min(_TOGETHER, vectors - first)),
            *(n_in, n_out, room.data_ptr(), room_size, jobs),
            jobs=jobs,
            work=n_in * n_out,
        )


decoding_linear = Operator(
    "decoding_linear(Tensor x, Tensor weight, Tensor scale, Tensor bias) -> Tensor",
    check=_check,
    allocate=lambda x, weight, scale, bias: x.new_empty((*x.shape[:-1], scale.shape[0])),
    run=_run,
)
"""Multiplies each vector of x by the matrix scale * weight, and adds bias. The last three are contiguous."""
