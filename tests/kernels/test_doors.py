"""Operators check shape, type, device and layout of every tensor before a kernel takes its address."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_every_wrong_argument_is_refused_by_name():
    """In a process of their own, because without the checks most of these calls end it."""
    variables = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "doors_worker.py")]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    found = dict(line.split("\t") for line in result.stdout.splitlines() if "\t" in line)
    last = next(reversed(found), "none")
    assert result.returncode == 0, f"status {result.returncode}, the last case was {last!r}\n{result.stderr[-3000:]}"
    assert len(found) > 150
    assert {case: said for case, said in found.items() if said != "refused"} == {}
