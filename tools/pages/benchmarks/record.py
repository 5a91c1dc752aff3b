"""The record of a measurement, one JSON file: machine, versions, settings, and every point."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from benchmarks.table import cpu_name

from recurra.files.digests import read_stamped, write_stamped
from tools.pages.benchmarks.limits import Limits
from tools.pages.benchmarks.sweeps import FLOOR, MODES, SWEEPS

FORMAT = 1
_ROOT = Path(__file__).parents[3]
_MUST_AGREE = ("format", "machine", "versions", "commit", "lengths", "limits", "budget_seconds")

Record = dict[str, Any]
"""As `new` makes it; `measure` fills "sweeps"."""


def new(lengths: list[int], limits: Limits, budget: float, command: str) -> Record:
    """Make a record without points."""
    return {
        "format": FORMAT,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": _commit(),
        "machine": _machine(),
        "versions": _versions(),
        "lengths": lengths,
        "limits": limits._asdict(),
        "budget_seconds": budget,
        "sweeps": {},
    }


def new_sweep(key: str) -> Record:
    """Describe a sweep, so that the page can be built from the file alone, with room for its points."""
    sweep = SWEEPS[key]
    return {
        "title": sweep.title,
        "shape": sweep.shape,
        "about": sweep.about,
        "floor_bytes": sweep.floor_bytes,
        "ways": {name: way.bound for name, way in sweep.ways.items()},
        "floor": FLOOR,
        "modes": {MODES[name]: name for name in sweep.ways if name in MODES},  # gate_loop's modes among the ways
        "absent": [name for name, way in sweep.ways.items() if not way.is_here],
        "auto": {},  # length: the mode that gate_loop takes by itself
        "memory": {},  # way: {length: MB above the inputs}
        "memory_done": [],  # ways whose memory was measured as far as it goes
        "stops": {},  # way: {"length", "reason", "estimate"} where its curve ends
        "times": {},  # length: {way: {"median", "low", "high", "ratio", "rounds"}}, seconds
    }


def save(record: Record, path: Path) -> None:
    """Write a record, whole or not at all."""
    write_stamped(path, record, indent=1)


def load(path: Path) -> Record:
    """Read a record.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a record of this format.
    """
    return read_stamped(path, version=FORMAT, mend="measure again")


def resume(path: Path, fresh: Record) -> Record:
    """Read a record in order to continue it with the settings of `fresh`.

    Raises:
        ValueError: it was begun with other settings; the message gives both values.
    """
    record = load(path)
    for name in _MUST_AGREE:
        if record[name] != fresh[name]:
            raise ValueError(
                f"{name} is {fresh[name]}; expected {record[name]}, as in {path}: use the same settings, or omit "
                "--resume to measure again"
            )
    return record


def _machine() -> Record:
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gb": round(gigabytes),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("numba", "gateloop-transformer", "jax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=_ROOT, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "src", "benchmarks", "tools")
        return git("rev-parse", "--short=10", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
