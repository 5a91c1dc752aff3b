"""What was measured, in one JSON file: machine, versions, settings, and every point."""

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.page.limits import Limits
from benchmarks.page.sweeps import FLOOR, MODES, SWEEPS
from benchmarks.table import cpu_name

FORMAT = 1
_ROOT = Path(__file__).parents[2]
_MUST_AGREE = ("format", "machine", "versions", "commit", "lengths", "limits", "budget_seconds")

Record = dict[str, Any]
"""As `new` makes it; `benchmarks.page.measure` fills "sweeps"."""


def new(lengths: list[int], limits: Limits, budget: float, command: str) -> Record:
    """A record without points."""
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
    """What the page says of a sweep, so that it can be built from the file alone, and room for its points."""
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
        "stops": {},  # way: {"length", "reason", "estimate"} where it was not measured any more
        "times": {},  # length: {way: {"median", "low", "high", "ratio", "rounds"}}, seconds
    }


def save(record: Record, path: Path) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)


def load(path: Path) -> Record:
    """Read a record.

    Raises:
        OSError: there is no such file.
        ValueError: it is no record, or of another format.
    """
    try:
        record = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON file: {error}; measure anew") from None
    found = record.get("format") if isinstance(record, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} is of format {found}; expected {FORMAT}: measure anew")
    return record


def resume(path: Path, fresh: Record) -> Record:
    """The record in a file, to go on with, where it was begun with the same settings as `fresh`.

    Raises:
        ValueError: a setting differs; the message gives both values.
    """
    record = load(path)
    for name in _MUST_AGREE:
        if record[name] != fresh[name]:
            raise ValueError(
                f"{path} was begun with {name} {record[name]}, and now it is {fresh[name]}; give the same settings, "
                f"or leave out --resume to measure anew"
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
        changed = git("status", "--porcelain", "--", "src", "benchmarks")
        return git("rev-parse", "--short=10", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
