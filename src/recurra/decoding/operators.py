"""A laid-out matrix times a few vectors, as a torch operator, so that a traced model can contain it.

    recurra::decoding_linear    y = scale (W x) + bias      x (..., n_in) float32, W (n_out, n_in), scale, bias (n_out)

It has no derivative: asking for one raises.
"""

import torch
from torch import Tensor

from recurra.checks import kind_of, require_layout, sentence
from recurra.kernels.tensors import require_one_device, usable_threads

_NUMBERS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}

_library = torch.library.Library("recurra", "FRAGMENT")
_library.define("decoding_linear(Tensor x, Tensor weight, Tensor scale, Tensor bias) -> Tensor")


def _check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> None:
    if weight.dim() != 2 or weight.dtype not in _NUMBERS or not weight.is_contiguous():
        raise ValueError(
            sentence("weight", kind_of(weight), f"contiguous {', '.join(_NUMBERS.values())} (n_out, n_in)")
        )
    n_out, n_in = weight.shape
    require_layout("x", x, (*x.shape[:-1], n_in), torch.float32, weight.device)
    for name, tensor in (("scale", scale), ("bias", bias)):
        require_layout(name, tensor, (n_out,), torch.float32, weight.device)
        if not tensor.is_contiguous():
            raise ValueError(sentence(name, f"a view with strides {tensor.stride()}", "a contiguous tensor"))


def decoding_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Multiply each vector of `x` by the matrix scale * weight, and add `bias`.

    Raises:
        ValueError: a tensor is of another shape, type, device or memory layout than above; weight, scale and bias are
            contiguous.
    """
    return torch.ops.recurra.decoding_linear(x, weight, scale, bias)


def _decoding_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    from recurra.decoding.matvec_kernels import matvec_kernel

    _check(x, weight, scale, bias)
    x, (n_out, n_in) = x.contiguous(), weight.shape
    y = torch.empty((*x.shape[:-1], n_out))
    if y.numel() == 0:
        return y
    span = -(-n_out // usable_threads())
    matvec_kernel(_NUMBERS[weight.dtype])(
        *(weight.data_ptr(), scale.data_ptr(), bias.data_ptr(), x.data_ptr(), y.data_ptr()),
        *(y.numel() // n_out, n_in, n_out, span),
        jobs=-(-n_out // span),
        work=weight.numel(),
    )
    return y


_library.impl("decoding_linear", _decoding_linear, "CPU")


@torch.library.register_fake("recurra::decoding_linear", lib=_library)
def _fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    require_one_device(weight=weight, x=x, scale=scale, bias=bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
