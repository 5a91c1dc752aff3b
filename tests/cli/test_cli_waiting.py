"""The command line has torch's threads wait briefly for work, before torch is loaded."""

import platform

import pytest
from tests.processes import in_new_interpreter

CLEAR = """
import os, sys
for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
    os.environ.pop(name, None)
"""


def test_a_command_sets_it_before_torch_is_loaded():
    program = f"""{CLEAR}
from recurra.cli import main
main(["--version"])
print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
"""
    assert in_new_interpreter(program).split()[2:] == ["1000", "False"]


@pytest.mark.parametrize(
    ("before", "spins"),
    [
        ("os.environ['GOMP_SPINCOUNT'] = '7'", "7"),
        ("os.environ['OMP_WAIT_POLICY'] = 'passive'", None),
        ("import torch", None),  # which does not read it any more
    ],
)
def test_what_was_chosen_before_stays(before, spins):
    program = f"""{CLEAR}
{before}
from recurra.cli import main
main(["--version"])
print(os.environ.get("GOMP_SPINCOUNT"))
"""
    assert in_new_interpreter(program).split()[-1] == str(spins)


@pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere torch has another OpenMP than GNU's")
def test_openmp_reads_it():
    program = f"""{CLEAR}
os.environ["OMP_DISPLAY_ENV"] = "verbose"
from recurra.cli import main
main(["--version"])
import torch
"""
    assert "GOMP_SPINCOUNT = '1000'" in in_new_interpreter(program)
