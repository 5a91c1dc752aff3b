"""Peak memory of a method over all lengths, in a separate process: `python -m tools.pages.benchmarks.memory SWEEP WAY`.

This is the resident memory of the process as the kernel counts it: the high-water mark during a call, reset before it,
less what was resident then. malloc is told to return every large block at once, so that no call finds memory of the
previous one. An empty call measures about 0.04 MB.
"""

import argparse
import ctypes
import gc
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.pages.benchmarks.limits import Limits, next_cost
from tools.pages.benchmarks.sweeps import SWEEPS

_M_MMAP_THRESHOLD = -3  # from glibc's <malloc.h>
_ROOT = Path(__file__).parents[3]


def _resident() -> dict[str, float]:
    """Read VmRSS, the current memory, and VmHWM, its peak, in MB."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0][:-1]: int(line[1]) / 1024 for line in lines if line[0] in ("VmRSS:", "VmHWM:")}


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _return_memory() -> None:
    """Return free memory to the kernel, small blocks included, of which a graph has many."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def measure(sweep: str, way: str, lengths: Sequence[int], limits: Limits) -> Iterator[dict[str, Any]]:
    """Yield {"length", "megabytes", "seconds"} for each length, and {"stop"} where a limit ends the curve.

    `megabytes` is above the inputs. Here a call may take twice `limits.seconds`: its memory comes fresh from the
    kernel, which costs time; the limit itself is kept where time is measured.

    Raises:
        OSError: this is not Linux with glibc, so that a call's peak cannot be told.
    """
    if platform.libc_ver()[0] != "glibc" or not Path("/proc/self/clear_refs").exists():
        raise OSError("peak memory is measured through glibc and /proc; run this on Linux with glibc")
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
    inputs, build = SWEEPS[sweep].inputs, SWEEPS[sweep].ways[way].build
    for _ in range(2):
        build(inputs(lengths[0]))()  # loads and compiles what the first call needs
    _return_memory()
    start = _resident()["VmRSS"]
    seconds: list[float] = []
    totals: list[float] = []
    for length in lengths:
        if seconds:
            stop = _why_stop(length, next_cost(seconds), next_cost(totals), limits)
            if stop:
                yield {"stop": stop}
                return
        x = inputs(length)
        call = build(x)
        _return_memory()
        _reset_peak()
        before, began = _resident()["VmRSS"], time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - began)
        peak = _resident()["VmHWM"]
        totals.append(max(peak - start, 0.01))
        yield {"length": length, "megabytes": max(peak - before, 0.0), "seconds": seconds[-1]}
        del x, call, result
        _return_memory()


def _why_stop(length: int, seconds: float, megabytes: float, limits: Limits) -> dict[str, Any] | None:
    if megabytes / 1024 > limits.gigabytes:
        return {"length": length, "reason": "memory", "estimate": megabytes / 1024}
    if seconds > 2 * limits.seconds:
        return {"length": length, "reason": "time", "estimate": seconds}
    return None


def in_a_process(
    sweep: str, way: str, lengths: Sequence[int], limits: Limits, threads: int
) -> Iterator[dict[str, Any]]:
    """Yield the same from a new process, as it measures; if it dies, for lack of memory say, the curve ends."""
    command = [sys.executable, "-m", "tools.pages.benchmarks.memory", sweep, way, "--threads", str(threads)]
    command += ["--seconds", str(limits.seconds), "--gigabytes", str(limits.gigabytes)]
    command += ["--lengths", *map(str, lengths)]
    # A session of its own, so that Ctrl-C comes to this process alone, which then ends the other.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT, start_new_session=True)
    reached = 0
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            reached += "length" in found
            yield found
        if process.wait() != 0:
            if reached == 0:
                raise RuntimeError(f"measuring the memory of {way} ({sweep}) failed; its message is above")
            length = lengths[min(reached, len(lengths) - 1)]
            yield {"stop": {"length": length, "reason": "failure", "estimate": process.returncode}}
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def main() -> None:
    """Measure in this process, and print a line of JSON for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("way")
    parser.add_argument("--lengths", type=int, nargs="+", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--gigabytes", type=float, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    limits = Limits(arguments.seconds, arguments.gigabytes)
    for found in measure(arguments.sweep, arguments.way, arguments.lengths, limits):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
