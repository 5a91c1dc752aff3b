"""How long the threads of a command wait busily for work."""

import os
import sys

SPINS = "GOMP_SPINCOUNT"
POLICY = "OMP_WAIT_POLICY"
_ENOUGH = "1000"
"""Tens of microseconds: longer than the pauses between a small model's operations, and too short to delay others."""


def wait_briefly() -> None:
    """Have torch's threads go to sleep soon when there is no work, unless the environment says otherwise.

    By default, a thread of GNU's OpenMP (torch's on Linux) spins 300,000 times before it sleeps. Where another process
    wants the same core, every operation then waits for the thread that is held up there. Sleeping at once
    (OMP_WAIT_POLICY=passive) costs a system call per operation instead. OpenMP reads these variables when torch is
    loaded, so they are set before, and only by the command line: a process of their own belongs to its users.
    """
    if "torch" not in sys.modules and POLICY not in os.environ:
        os.environ.setdefault(SPINS, _ENOUGH)
