"""Vectors as whole numbers with one scale, the form in which copies for decoding may keep states.

The codes, padded to a multiple of 16 of them, are followed by the scale: a float32, in the same memory.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

_UNIT = 16  # codes: a register of floats
_SMALLEST = 1e-30  # vectors of smaller numbers become zeros: the reciprocal of their scale may be infinite


def quantized_size(n: int, codes: torch.dtype) -> int:
    """Return the size of a vector of n numbers: its codes, and those that its scale takes the place of."""
    return -(-n // _UNIT) * _UNIT + 4 // codes.itemsize


def quantized(x: Float[Tensor, "*batch n"], codes: torch.dtype) -> Int[Tensor, "*batch size"]:
    """Round vectors to int8 codes of up to 127, or int16 codes of up to 32,767; the largest number gets that code."""
    largest, most = x.float().abs().amax(-1, keepdim=True), torch.iinfo(codes).max
    factor = torch.where(largest > _SMALLEST, most / largest, 0.0)
    padding = -x.shape[-1] % _UNIT
    return torch.cat([functional.pad((x * factor).round().to(codes), (0, padding)), (largest / most).view(codes)], -1)


def dequantized(x: Int[Tensor, "*batch size"], n: int) -> Float[Tensor, "*batch n"]:
    """Return the numbers that `quantized` vectors of n numbers stand for, in float32."""
    return x[..., :n].float() * x[..., -(4 // x.dtype.itemsize) :].contiguous().view(torch.float32)
