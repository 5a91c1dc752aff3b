"""No call of a public operator, whatever its tensors look like in memory, crashes or gives another result."""

import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_random_calls_are_right_or_refused():
    """In a process of their own, so that a crash is a failure and not the end of the suite."""
    variables = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "fuzz_worker.py")]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900)
    lines = result.stdout.splitlines()
    last = next((line for line in reversed(lines) if line.startswith("case ")), "none")
    status = f"status {result.returncode}"
    if result.returncode < 0:
        status = f"signal {signal.Signals(-result.returncode).name}"
    assert result.returncode == 0, f"{status} in {last}\n{result.stderr[-4000:]}"
    assert sum(line.startswith("done ") for line in lines) == 11
    assert sum(line.startswith("case ") for line in lines) > 1000
