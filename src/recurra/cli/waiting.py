"""How long the threads of a command wait busily for work."""

import os
import sys

_SPINS = "1000"
"""Longer than the pauses between a small model's operations, and short enough to leave a core to others soon."""


def wait_briefly() -> None:
    """Have torch's threads go to sleep soon when there is no work, unless the environment says otherwise.

    By default, a thread of GNU's OpenMP (torch's on Linux) spins 300,000 times before it sleeps. Where another process
    wants the same core, every operation then waits for the thread that is held up there. Sleeping at once
    (OMP_WAIT_POLICY=passive) costs a system call per operation instead. OpenMP reads these variables when torch is
    loaded, so this has to come before. A library must not set them for the program that imports it; a command may.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
