"""Operators check shape, type, device and layout of every tensor before a kernel takes its address."""

from pathlib import Path

from tests.processes import Program, run_file


def test_every_wrong_argument_is_refused_by_name(tmp_path):
    """In a process of their own, because without the checks most of these calls end it."""
    worker = Path(__file__).with_name("doors_worker.py")
    ended = Program(run_file(worker), tmp_path, OMP_NUM_THREADS="1").wait(300)
    found = dict(line.split("\t") for line in ended.stdout.splitlines() if "\t" in line)
    last = next(reversed(found), "none")
    assert ended.status == 0, f"status {ended.status}, the last case was {last!r}\n{ended.stderr[-3000:]}"
    assert len(found) > 90
    assert {case: said for case, said in found.items() if said != "refused"} == {}
