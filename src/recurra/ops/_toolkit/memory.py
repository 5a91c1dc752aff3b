"""Memory for large results, in huge pages: most of their time goes into page faults, one for each 4 KiB."""

import ctypes
import functools
import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor

_LARGE = 2**23  # bytes from which a result is worth two system calls; glibc maps blocks of this size by themselves
_PAGE, _HUGE = 2**12, 2**21
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@functools.cache
def _madvise() -> ctypes._CFuncPtr | None:
    """Return the C library's function where the system gives huge pages to those who ask, and None elsewhere."""
    try:
        asked_for = "[madvise]" in _SETTING.read_text() and mmap.PAGESIZE == _PAGE
    except OSError:
        asked_for = False
    if sys.platform != "linux" or not asked_for or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function


def empty_result(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return dense memory for a result of the shape, type (unless given) and device of `like`, for the caller to fill.

    If it is large, in huge pages.
    """
    return in_huge_pages(torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format))


def in_huge_pages(result: Tensor) -> Tensor:
    """Return `result`, dense memory that nobody has written to, and ask for huge pages if it is large and on the CPU.

    They are for the part of the memory that holds whole ones. This is advice: a system that has no such pages left
    gives small ones. A fake tensor has no memory to advise on.
    """
    is_large = type(result) is Tensor and result.nbytes >= _LARGE and result.device.type == "cpu"
    if is_large and (madvise := _madvise()) is not None:
        start = -(-result.data_ptr() // _HUGE) * _HUGE
        size = (result.data_ptr() + result.nbytes - start) // _HUGE * _HUGE
        if size > 0:
            madvise(start, size, mmap.MADV_HUGEPAGE)
    return result
