"""Make glibc keep large blocks of memory instead of returning them to the kernel after each use."""

import ctypes
import platform

# From glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# Releases of glibc that limit the threshold refuse more than this on 64-bit machines (HEAP_MAX_SIZE / 2).
_OLDER_LIMIT = 32 * 2**20
_LARGE = 2**30


def keep_large_blocks() -> bool:
    """Raise malloc's mmap and trim thresholds for this process, and return whether that worked.

    Above the mmap threshold, which never grows past 32 MB by itself, glibc maps each block when it is allocated and
    unmaps it when it is freed. Every activation of a training step then costs a page fault, and zeroing by the kernel,
    for each 4 KB, again and again for the same sizes; an element-wise operation can take several times as long. With
    higher thresholds, freed blocks stay in the heap and are used again. The price is that the process keeps its peak
    memory until it ends. That is right for a training run, but it is not for a library to decide, so only the command
    line calls this.

    Does nothing if the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    mapped = mallopt(_M_MMAP_THRESHOLD, _LARGE) or mallopt(_M_MMAP_THRESHOLD, _OLDER_LIMIT)
    return bool(mapped and mallopt(_M_TRIM_THRESHOLD, _LARGE))
