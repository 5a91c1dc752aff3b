"""No call of an operator with a kernel, whatever its tensors look like in memory, crashes or gives another result."""

import signal
from pathlib import Path

import pytest
from tests.processes import Program, run_file


@pytest.mark.parametrize("share", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_random_calls_are_right_or_refused(share, tmp_path):
    """In a process of their own, so that a crash is a failure and not the end of the suite."""
    worker = Path(__file__).with_name("fuzz_worker.py")
    ended = Program(run_file(worker, share), tmp_path, OMP_NUM_THREADS="1").wait(900)
    lines = ended.stdout.splitlines()
    last = next((line for line in reversed(lines) if line.startswith("case ")), "none")
    status = f"status {ended.status}"
    if ended.status < 0:
        status = f"signal {signal.Signals(-ended.status).name}"
    assert ended.status == 0, f"{status} in {last}\n{ended.stderr[-4000:]}"
    assert sum(line.startswith("done ") for line in lines) == 9
    assert sum(line.startswith("case ") for line in lines) > 800 // share
