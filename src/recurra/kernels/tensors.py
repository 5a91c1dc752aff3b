"""Tensors as kernels take them: an address, strides and neighbouring channels, split into a job for every thread."""

import torch
from torch import Tensor

from recurra.kernels.fork import is_forked_child

HALF = (torch.float16, torch.bfloat16)
"""Types that are computed in float32."""

_CACHE_LINE = 64  # rows are split at multiples of this many floats, so that no two jobs share a cache line


def with_neighbouring_channels(tensor: Tensor) -> Tensor:
    """Return `tensor` with its last dimension dense in memory; other strides stay as they are, even 0."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def addresses(*tensors: Tensor) -> list[int]:
    """Return where the numbers of dense tensors begin."""
    return [tensor.data_ptr() for tensor in tensors]


def describe(tensor: Tensor) -> tuple[int, int, int]:
    """Describe a (B, L, D) tensor to a kernel: (address, batch stride, time stride), strides in floats."""
    floats = 2 if tensor.is_complex() else 1
    return tensor.data_ptr(), tensor.stride(0) * floats, tensor.stride(1) * floats


def usable_threads() -> int:
    """Return the number of threads that a kernel may use: torch's, but one in a forked child."""
    return 1 if is_forked_child() else torch.get_num_threads()


def span_of_job(row: int, batch: int) -> int:
    """Return the floats per job that give every thread work: a whole row if there are enough sequences."""
    parts = -(-usable_threads() // batch)
    span = -(-row // parts)
    return min(row, -(-span // _CACHE_LINE) * _CACHE_LINE)
