"""What a benchmark says: rows, printed as a table and kept as JSON."""

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.timing import quartiles


@dataclass
class Row:
    """One measured function."""

    what: str
    name: str
    seconds: list[float]
    ratio: float
    target: float | None = None
    sense: str = "at most"

    @property
    def verdict(self) -> str:
        """Whether the target was met, where there is one."""
        if self.target is None:
            return ""
        met = self.ratio <= self.target if self.sense == "at most" else self.ratio >= self.target
        return f"{self.sense} {self.target}: {'met' if met else 'MISSED'}"


def show(title: str, rows: Iterable[Row]) -> list[Row]:
    """Print the rows as they come."""
    print(f"\n{title}\n{'':32} {'':46} {'ms: median [quartiles]':>26} {'ratio':>7}", flush=True)
    kept, last = [], ""
    for row in rows:
        what = row.what if row.what != last else ""
        print(f"{what:32} {row.name:46} {quartiles(row.seconds):>26} {row.ratio:7.2f}  {row.verdict}", flush=True)
        kept.append(row)
        last = row.what
    return kept


def save(path: Path, sections: dict[str, list[Row]]) -> None:
    """Write everything with the versions and the machine it was measured on."""
    machine = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    content = {"machine": machine | {"python": platform.python_version()}}
    content |= {title: [vars(row) | {"verdict": row.verdict} for row in rows] for title, rows in sections.items()}  # type: ignore[misc]
    print()
    keep(path, content)


def keep(path: Path, content: object) -> None:
    """Write results as JSON, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))
    print(f"written: {path}")


def megabytes(what: str, pid: int | str = "self") -> float:
    """Memory of a process in MB, as /proc names it: VmRSS, VmHWM (its peak) or RssAnon (without mapped files)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) / 1024


def cpu_name() -> str:
    """The processor, as the system names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
