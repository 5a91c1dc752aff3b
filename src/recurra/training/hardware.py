"""The hardware that a measurement was made on."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from recurra.training.precision import has_native_bfloat16


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
