"""The process and its machine: memory that comes back, devices and their numbers, launchers, signals."""

import ctypes
import os
import platform
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from recurra.checks import sentence

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's <malloc.h>
_LARGE, _OLDER_LIMIT = 2**30, 32 * 2**20  # older releases of glibc refuse more than HEAP_MAX_SIZE / 2


def keep_large_blocks() -> bool:
    """Let glibc keep large freed blocks in the heap, and return whether that worked (False for other C libraries).

    By default it maps each block above 32 MB anew, at a page fault per 4 KB. The price is that the process keeps its
    peak memory, which a program may decide, not a library: only the command line calls this.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    mapped = mallopt(_M_MMAP_THRESHOLD, _LARGE) or mallopt(_M_MMAP_THRESHOLD, _OLDER_LIMIT)
    return bool(mapped and mallopt(_M_TRIM_THRESHOLD, _LARGE))


def return_free_memory() -> None:
    """Return the pages of freed blocks to the system. glibc keeps them otherwise; other C libraries ignore this."""
    with suppress(AttributeError, TypeError):  # Windows has no library without a name
        ctypes.CDLL(None).malloc_trim(0)


def has_native_bfloat16(device: str) -> bool:
    """Say whether a device ("cpu" or "cuda") has units for bfloat16; elsewhere PyTorch emulates it, slowly."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available():  # nothing else multiplies matrices of bfloat16 fast
        return False
    # oneDNN takes bfloat16 on every x86 CPU with AVX-512, and emulates it on those from before AVX512_BF16.
    has_units = platform.machine().lower() not in ("x86_64", "amd64") or torch.cpu._is_avx512_bf16_supported()
    return bool(has_units and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def chosen_device(wanted: str, name: str = "training.accelerator") -> str:
    """Turn "auto", "cpu" or "cuda" into what there is; `name` is that of the option."""
    # Fabric's "auto" would also choose devices without float64 and complex numbers, such as Apple's.
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        got = "cuda, and PyTorch finds no CUDA device"
        raise ValueError(sentence(name, got, "cpu or auto on this machine"))
    return wanted


def hardware() -> dict[str, Any]:
    """Describe the processor, its cores, the threads that PyTorch uses, and the GPU if there is one."""
    # platform.processor() is empty on most Linux systems.
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    described = (line for line in lines if line.startswith("model name"))
    return {
        "processor": next((line.partition(":")[2].strip() for line in described), platform.machine()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector_units": torch.backends.cpu.get_cpu_capability(),
        "native_bfloat16": has_native_bfloat16("cpu"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
    }


def n_launched() -> int:
    """Count the processes that torchrun started together with this one; 1 without torchrun."""
    count = os.environ.get("WORLD_SIZE", "1")
    return int(count) if count.isdecimal() and int(count) > 0 else 1


def is_first_launched() -> bool:
    """Say whether this is the first of the processes that torchrun started, or the only one."""
    return n_launched() == 1 or os.environ.get("RANK", "0") == "0"


class StopSignal:
    """A context that remembers the signal that asked the process to end, so that a step and its checkpoint can finish.

    A second SIGINT or SIGTERM acts as without this class. SIGHUP is only recorded, because a closed terminal sends
    several; an ignored one, as under nohup, stays ignored. Outside the main thread nothing changes.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    HANG_UP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has none

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            numbers = list(self.SIGNALS)
            if self.HANG_UP is not None and signal.getsignal(self.HANG_UP) is not signal.SIG_IGN:
                numbers.append(self.HANG_UP)
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore(*self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        self._restore(*self.SIGNALS)

    def _restore(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            if number in self._before:
                signal.signal(number, self._before.pop(number))
