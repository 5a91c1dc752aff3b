"""The choice of a backend: plain torch, Numba's kernels on the CPU, or Triton's on CUDA."""

import importlib.util
import os
import warnings
from typing import Literal

import torch

from recurra.checks import require_literal, sentence

Backend = Literal["auto", "reference", "numba", "triton"]

_has_numba = importlib.util.find_spec("numba") is not None  # finds it without loading it
_is_disabled = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
NUMBA_IS_MISSING = "" if _has_numba else "Numba is not installed (it may not support this Python yet)"
if _has_numba and _is_disabled:  # Numba would run kernels as Python, which addresses do not survive
    NUMBA_IS_MISSING = "Numba compiles nothing (NUMBA_DISABLE_JIT is set)"
_has_triton = importlib.util.find_spec("triton") is not None
TRITON_IS_MISSING = "" if _has_triton else "Triton is not installed (the CUDA builds of PyTorch for Linux include it)"
_has_warned = False


def choose_backend(backend: str, device: torch.device) -> str:
    """Turn a backend's name into "reference", "numba" or "triton" for tensors on `device`."""
    if backend == "auto" and device.type == "cpu" and not NUMBA_IS_MISSING:
        return "numba"
    require_literal(Backend, backend=backend)
    if backend in ("numba", "triton"):
        if obstacle := _why_not(backend, device):
            raise RuntimeError(sentence("backend", repr(backend), "'auto' or 'reference'", obstacle))
        return backend
    if backend == "reference" or device.type not in ("cpu", "cuda"):
        return "reference"
    fastest, missing = ("numba", NUMBA_IS_MISSING) if device.type == "cpu" else ("triton", TRITON_IS_MISSING)
    if not missing:
        return fastest
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"{missing}: recurra uses its plain torch reference on {device}, which is far slower than its kernels",
            RuntimeWarning,
            stacklevel=3,
        )
    return "reference"


def _why_not(backend: str, device: torch.device) -> str:
    if backend == "numba":
        wrong = f"Numba's kernels run on the CPU, and the tensors are on {device}"
        return NUMBA_IS_MISSING if device.type == "cpu" else wrong
    if TRITON_IS_MISSING:
        return TRITON_IS_MISSING
    is_interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    if device.type == "cuda" or (device.type == "cpu" and is_interpreted):
        return ""
    return (
        f"Triton's kernels run on CUDA, and the tensors are on {device} (to test them on the CPU, start Python with "
        f"TRITON_INTERPRET=1)"
    )
