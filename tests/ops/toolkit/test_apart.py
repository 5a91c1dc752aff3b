"""Functions that kernels call by their address."""

from pathlib import Path

import numpy as np

from recurra.ops._toolkit.launch import Apart, call, compile_function
from recurra.ops._toolkit.vectors import Lanes, load, store

ROOT = Path(__file__).resolve().parents[2]
ONE = Lanes("float64", 1)


def _add(x, y, first, last):
    """Add numbers `first` to `last` of x to y, and return how many there are."""
    for i in range(first, last):
        store(y, i, ONE, load(x, i, ONE) + load(y, i, ONE))
    return last - first


add = Apart(_add)


SHARES = """
import numpy as np
from numba import prange
from recurra.ops._toolkit.launch import call
from recurra.ops._toolkit.launch import LoopKernel
from tests.ops.toolkit.test_apart import add

def add_shares(address, x, y, n, jobs):
    for job in prange(jobs):
        call(address, (x, y, n * job // jobs, n * (job + 1) // jobs))

kernel, x = LoopKernel(add_shares), np.arange(100.0)
for form in (kernel._serial, kernel._parallel):
    for jobs in (1, 3, 8):
        y = np.ones(100)
        form(add.address, x.ctypes.data, y.ctypes.data, 100, jobs)
        np.testing.assert_array_equal(y, x + 1)
print("added")
"""


def test_kernels_call_it_with_and_without_threads(run_python):
    """In a process of its own: threads of a kernel stay, and a fork after them would not live long."""
    path = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    assert run_python(path + SHARES, OMP_NUM_THREADS="2").split() == ["added"]


def test_what_it_returns_comes_back():
    @compile_function
    def count(address, x, first):
        return call(address, (x, x, first, 17))

    x = np.ones(20)
    assert count(add.address, x.ctypes.data, 5) == 12
    assert x.sum() == 20 + 12


def test_it_is_compiled_once_and_kept(run_python, tmp_path):
    """The second process finds it on disk, at another place in memory or the same."""
    (tmp_path / "kept.py").write_text(
        "from recurra.ops._toolkit.launch import Apart, call\n"
        "from recurra.ops._toolkit.launch import compile_function\n"
        "def _double(x):\n    return 2 * x\n"
        "double = Apart(_double)\n"
        "@compile_function\ndef through(address, x):\n    return call(address, (x,))\n"
    )
    program = """
    import os, sys
    import recurra.ops._toolkit.launch
    sys.path.insert(0, ".")
    for _ in range(2):
        if not os.fork():
            import kept
            print(kept.through(kept.double.address, 21), *kept.double.compiled.stats.cache_hits.values(), flush=True)
            os._exit(0)
        os.wait()
    """
    assert run_python(program).splitlines() == ["42", "42 1"]
