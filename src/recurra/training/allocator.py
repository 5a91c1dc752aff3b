"""Ask glibc to keep large blocks instead of handing them back to the kernel after each use."""

import ctypes
import platform

# From glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# Releases of glibc that bound the threshold refuse more than this on 64-bit machines (HEAP_MAX_SIZE / 2).
_OLDER_LIMIT = 32 * 2**20
_LARGE = 2**30


def keep_large_blocks() -> bool:
    """Raise malloc's mmap and trim thresholds for this process; return whether that was done.

    Above the mmap threshold, which never grows past 32 MB by itself, glibc maps each block anew and unmaps
    it when it is freed. Every activation of a training step then costs a page fault for each 4 KB and the
    kernel's zeroing, over and over for the same sizes; an element-wise operation takes up to several times
    as long. With the thresholds raised, freed blocks stay in the heap and are used again. The price is that
    the process keeps its peak memory until it ends: right for a training run, and not for a library to
    decide, so only the command line calls this.

    Does nothing where the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    mapped = mallopt(_M_MMAP_THRESHOLD, _LARGE) or mallopt(_M_MMAP_THRESHOLD, _OLDER_LIMIT)
    return bool(mapped and mallopt(_M_TRIM_THRESHOLD, _LARGE))
