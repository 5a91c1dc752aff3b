"""The product of a packed matrix and a few vectors as a torch operator, so that a traced model may hold it.

    recurra::packed_linear      y = scale (W x) + bias      x (..., n_in) float32, W (n_out, n_in), scale, bias (n_out)

It has no derivative: asking for one raises.
"""

import torch
from torch import Tensor

from recurra.kernels.fork import is_forked_child

_NUMBERS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}

_library = torch.library.Library("recurra", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor scale, Tensor bias) -> Tensor")


def packed_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Multiply each vector of `x` with the matrix that `weight` and `scale` stand for, and add `bias`."""
    return torch.ops.recurra.packed_linear(x, weight, scale, bias)


def _packed_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    from recurra.decoding.matvec_kernels import matvec_kernel

    x, (n_out, n_in) = x.contiguous(), weight.shape
    y = torch.empty((*x.shape[:-1], n_out))
    span = -(-n_out // (1 if is_forked_child() else torch.get_num_threads()))
    matvec_kernel(_NUMBERS[weight.dtype])(
        *(weight.data_ptr(), scale.data_ptr(), bias.data_ptr(), x.data_ptr(), y.data_ptr()),
        *(x.numel() // n_in, n_in, n_out, span),
        jobs=-(-n_out // span),
        work=weight.numel(),
    )
    return y


_library.impl("packed_linear", _packed_linear, "CPU")


@torch.library.register_fake("recurra::packed_linear", lib=_library)
def _fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
