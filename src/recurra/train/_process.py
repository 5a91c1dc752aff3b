"""The process of a run: memory, precision, hardware, threads, determinism, device, and the signals that stop it."""

import ctypes
import logging
import os
import platform
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from recurra.checks import sentence
from recurra.train._distributed import fabric_options, n_launched
from recurra.train.config import TrainingConfig

if TYPE_CHECKING:
    import lightning_fabric

# --- memory ---

# From glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGE, _OLDER_LIMIT = 2**30, 32 * 2**20
"""Thresholds; releases of glibc that limit them refuse more than the second (HEAP_MAX_SIZE / 2)."""


def keep_large_blocks() -> bool:
    """Let glibc keep large freed blocks in the heap, and return whether that worked (False for other C libraries).

    By default glibc maps and unmaps each block above 32 MB anew, so that every activation of a training step costs a
    page fault and zeroing per 4 KB: an element-wise operation can take several times as long. The price is that the
    process keeps its peak memory, which a program may decide, not a library: only the command line calls this.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    mapped = mallopt(_M_MMAP_THRESHOLD, _LARGE) or mallopt(_M_MMAP_THRESHOLD, _OLDER_LIMIT)
    return bool(mapped and mallopt(_M_TRIM_THRESHOLD, _LARGE))


# --- precision ---


def has_native_bfloat16(device: str) -> bool:
    """Say whether a device ("cpu" or "cuda") has units for bfloat16; elsewhere PyTorch emulates it, slowly."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available():  # nothing else multiplies matrices of bfloat16 fast
        return False
    # oneDNN takes bfloat16 on every CPU with AVX-512, and emulates it on those from before AVX512_BF16
    # on other processors than x86, oneDNN knows
    has_units = platform.machine().lower() not in ("x86_64", "amd64") or torch.cpu._is_avx512_bf16_supported()
    return bool(has_units and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def precision_note(asked: str, chosen: str, device: str) -> str:
    """Return a note on the precision `chosen` for `training.precision` (`asked`) on a device; empty if none is due."""
    name = "GPU" if device == "cuda" else "CPU"
    if asked == "auto":
        has = "has" if chosen == "bf16-mixed" else "has no"
        return f"note: training.precision auto is {chosen} here: this {name} {has} native bfloat16"
    if chosen == "bf16-mixed" and not has_native_bfloat16(device):
        return (
            f"warning: training.precision is bf16-mixed, and this {name} has no native bfloat16: it is slower than "
            "float32; new runs can use 32-true or auto"
        )
    return ""


def hardware() -> dict[str, Any]:
    """Describe the processor, its cores, the threads that PyTorch uses, and the GPU if there is one."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector_units": torch.backends.cpu.get_cpu_capability(),
        "native_bfloat16": has_native_bfloat16("cpu"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
    }


def _processor() -> str:
    # platform.processor() is empty on most Linux systems.
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# --- the process ---


def set_up_process(config: TrainingConfig) -> "lightning_fabric.Fabric":
    """Set up this process as a `settled` config says, including seeds, and return the Fabric that places the model."""
    # slow to import
    from lightning_fabric import Fabric
    from lightning_fabric.utilities.seed import seed_everything

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        # cuBLAS reads this when it starts; without it, deterministic mode raises an error on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.allow_tf32 = False  # it is True by default, and float32 is to mean float32
    seed_everything(config.seed, verbose=False)
    accelerator = chosen_device(config.accelerator)
    if n_launched() > 1:
        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it greets from every rank
    fabric = Fabric(accelerator=accelerator, precision=config.precision, **fabric_options(config, accelerator))
    fabric.launch()
    return fabric


def reseed(config: TrainingConfig, rank: int) -> None:
    """Give a rank random numbers of its own, once all ranks have made the same model. The first keeps those it has."""
    if rank:
        from lightning_fabric.utilities.seed import seed_everything

        seed_everything((config.seed + rank) % 2**32, verbose=False)


def settled(config: TrainingConfig) -> TrainingConfig:
    """Replace what `config` leaves to this machine and a run has to keep: `precision: auto`."""
    if config.precision != "auto":
        return config
    native = has_native_bfloat16(chosen_device(config.accelerator))
    return replace(config, precision="bf16-mixed" if native else "32-true")


def chosen_device(wanted: str, name: str = "training.accelerator") -> str:
    """Turn "auto", "cpu" or "cuda" into what there is; `name` is that of the option."""
    # Fabric's "auto" would also choose devices without float64 and complex numbers, such as Apple's.
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        got = "cuda, and PyTorch finds no CUDA device"
        raise ValueError(sentence(name, got, "cpu or auto on this machine"))
    return wanted


# --- signals ---


class StopSignal:
    """A context that remembers the signal that asked the process to end, so that a step and its checkpoint can finish.

    The first signal is recorded, and the previous handlers of SIGINT and SIGTERM return: a second one acts as without
    this class. SIGHUP is only recorded, because a closed terminal sends several; an ignored one, as under nohup, stays
    ignored. Outside the main thread nothing changes, and `received` stays None.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore(*self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        self._restore(*self.SIGNALS)

    def _restore(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            if number in self._before:
                signal.signal(number, self._before.pop(number))
