"""The command line has torch's threads wait briefly for work, before torch is loaded."""

import sys

import pytest
from tests.processes import in_new_interpreter

from recurra.cli import _let_threads_sleep


def test_openmp_reads_it():
    program = """
import ctypes, importlib.util, os, pathlib, sys
for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
    os.environ.pop(name, None)
os.environ["OMP_DISPLAY_ENV"] = "verbose"
from recurra.cli import main
main(["--version"])
assert "torch" not in sys.modules
folder = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib"
for library in folder.glob("libgomp*"):  # torch loads it, but takes seconds
    ctypes.CDLL(str(library))
"""
    said = in_new_interpreter(program)
    assert "GOMP_SPINCOUNT = '1000'" in said or sys.platform != "linux"  # elsewhere torch has another OpenMP


@pytest.mark.parametrize(
    ("variables", "loaded", "spins"),
    [({"GOMP_SPINCOUNT": "7"}, False, "7"), ({"OMP_WAIT_POLICY": "passive"}, False, None), ({}, True, None)],
)
def test_what_was_chosen_before_stays(monkeypatch, variables, loaded, spins):
    environment = dict(variables)
    monkeypatch.setattr("os.environ", environment)
    monkeypatch.setattr(sys, "modules", {"torch": None} if loaded else {})
    _let_threads_sleep()
    assert environment.get("GOMP_SPINCOUNT") == spins
