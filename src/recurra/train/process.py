"""The process of a run: threads, memory, determinism, device, precision, and the hardware it measures on."""

import ctypes
import logging
import os
import platform
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from recurra.checks import sentence
from recurra.train.config import TrainingConfig
from recurra.train.distributed import fabric_options, n_launched

if TYPE_CHECKING:
    import lightning_fabric

# --- make glibc keep large blocks of memory instead of returning them to the kernel after each use ---


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


# --- whether this machine multiplies bfloat16, and the precision that `training.precision: auto` takes for it ---


_SIZE = 192
"""Rows of the matrices that are multiplied to measure: without bfloat16 units one product takes about 10 ms."""


def has_native_bfloat16(device: str) -> bool:
    """Ask whether a device ("cpu" or "cuda") multiplies bfloat16 in units of its own.

    Elsewhere PyTorch computes the same products slowly: a CPU in plain loops or by way of float32, an older GPU by
    emulation.
    """
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available():  # nothing else multiplies matrices of bfloat16 fast
        return False
    # oneDNN takes bfloat16 on every CPU with AVX-512, and emulates it on those from before AVX512_BF16
    return _has_units() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _known_precision(config: TrainingConfig, device: str) -> TrainingConfig:
    """Replace `precision: auto` with what suits a device ("cpu" or "cuda"); leave any other precision as it is."""
    if config.precision != "auto":
        return config
    return replace(config, precision="bf16-mixed" if has_native_bfloat16(device) else "32-true")


def precision_note(asked: str, chosen: str, device: str) -> str:
    """Say what a run should be told about its precision; empty if nothing.

    Args:
        asked: `training.precision` of the recipe or the run.
        chosen: what the run computes in.
        device: "cpu" or "cuda".
    """
    if asked == "auto":
        has = "has" if chosen == "bf16-mixed" else "has no"
        return f"note: training.precision auto is {chosen} here: this {_name(device)} {has} native bfloat16"
    if chosen == "bf16-mixed" and not has_native_bfloat16(device):
        ratio = _bfloat16_over_float32(device)
        return (
            f"warning: training.precision is bf16-mixed, and this {_name(device)} has no native bfloat16: a matrix "
            f"product takes {ratio:.1f} times as long as in float32; new runs can use 32-true or auto"
        )
    return ""


def _bfloat16_over_float32(device: str, rounds: int = 5) -> float:
    """Measure the time of a matrix product in bfloat16 over that in float32: the least of a few rounds of each."""
    one = torch.ones(_SIZE, _SIZE, device=device)
    two = one.bfloat16()
    least = {one: float("inf"), two: float("inf")}
    for _ in range(rounds):
        for matrix in least:
            start = perf_counter()
            matrix @ matrix
            if device == "cuda":
                torch.cuda.synchronize()
            least[matrix] = min(least[matrix], perf_counter() - start)
    return least[two] / least[one]


def _has_units() -> bool:
    """Whether an x86 processor has instructions for products of bfloat16; True on others, where oneDNN knows."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported())


def _name(device: str) -> str:
    return "GPU" if device == "cuda" else "CPU"


# --- the hardware that a measurement was made on ---


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


# --- the process of a run: threads, determinism, device, precision, and the ranks beside it ---


def set_up_process(config: TrainingConfig) -> "lightning_fabric.Fabric":
    """Set up this process as `config` says, including its seeds, and return the Fabric that places and runs the model.

    Args:
        config: `settled`.
    """
    # Takes a second or two to import; reading a run, scoring it and generating text do without it.
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
    return _known_precision(config, chosen_device(config.accelerator))


def chosen_device(wanted: str, name: str = "training.accelerator") -> str:
    """Turn "auto", "cpu" or "cuda" into what there is; `name` is that of the option."""
    # Fabric's "auto" would also choose devices without float64 and complex numbers, such as Apple's.
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        got = "cuda, and PyTorch finds no CUDA device"
        raise ValueError(sentence(name, got, "cpu or auto on this machine"))
    return wanted
