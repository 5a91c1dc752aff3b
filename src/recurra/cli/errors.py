"""How a command that fails ends: one message in plain words, and an exit code for its kind."""

import os
import re
import sys
from contextlib import suppress

FAILED = 2
_MISTAKE = 70  # EX_SOFTWARE of sysexits.h: the fault is in Recurra, not in what it was given
_INTERRUPTED = 130
_NOBODY_READS = 141  # what shells report for a program that wrote into a closed pipe: 128 + SIGPIPE

_EXTRAS = {
    "av": "video",
    "transformers": "hf",
    "safetensors": "hf",
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "export",
    "executorch": "executorch",
    "fastapi": "serve",
    "uvicorn": "serve",
    "pydantic": "serve",
    "sse_starlette": "serve",
    "prometheus_client": "serve",
    "datasets": "data",
    "pytorch_optimizer": "optimizers",
}
"""Packages that some commands need, with the extra that installs each."""

# "you tried to allocate 400 bytes" of PyTorch's allocator for CPUs, "Tried to allocate 20.00 GiB" of that for CUDA,
# "Unable to allocate 8.00 PiB" of NumPy
_ALLOCATION = re.compile(r"(?:tried|unable) to allocate ([\d.]+ ?(?:bytes|[KMGTPE]i?B))", re.IGNORECASE)


def report(command: str, error: BaseException) -> int:
    """Print what happened, for `error` as a command raised it, and return the exit code."""
    if isinstance(error, BrokenPipeError):  # `recurra generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails again when it exits
        return _NOBODY_READS
    text, code = _described(error)
    with suppress(OSError):  # nobody reads, as after the terminal was closed
        print(f"{command}: {text}", file=sys.stderr)
    return code


def named(error: BaseException) -> str:
    """Write an error as Python does: its type, and what it says, if anything."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _described(error: BaseException) -> tuple[str, int]:
    """Describe an error in plain words, with the exit code for its kind."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", _INTERRUPTED
    if isinstance(error, ImportError) and (extra := _EXTRAS.get((error.name or "").partition(".")[0])):
        return f"{error.name} is missing: pip install 'recurra[{extra}]'", FAILED
    asked_for = _ALLOCATION.search(str(error))
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and asked_for):
        how_much = f"{asked_for[1]} were asked for at once" if asked_for else "a request for more was refused"
        return f"out of memory: {how_much}; a smaller model, batch or sequence needs less", FAILED
    if isinstance(error, (ValueError, OSError, FloatingPointError)):
        # The library raises these for a wrong key, value, file or checkpoint, and for a run that diverged.
        return str(error), FAILED
    return f"{named(error)}. This should not have happened; please report it, with --debug for the traceback", _MISTAKE
