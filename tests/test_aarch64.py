"""The kernels as code for 64-bit ARM; `make aarch64` runs all of them, one runs here."""

import shutil
import subprocess
import sys

import pytest
import torch
from tools.aarch64 import emulated
from tools.aarch64.emulated import COMPILER, EMULATOR, operations

needs_emulation = pytest.mark.skipif(
    any(shutil.which(name) is None for name in (COMPILER, EMULATOR)),
    reason=f"needs {EMULATOR} and {COMPILER} (on Debian: qemu-user and gcc-aarch64-linux-gnu)",
)


@needs_emulation
def test_a_scan_gives_the_same_numbers_on_arm():
    case = "linear_scan, 5 channels, complex64"
    done = subprocess.run([sys.executable, "-m", "tools.aarch64", case], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 2 calls differ" in done.stdout


def test_what_counts_as_a_difference():
    def difference(mine, right):
        parts = (torch.tensor(part) for part in (mine, right))
        first, second = (part.numpy().tobytes() for part in parts)
        return emulated._difference(first, second, torch.tensor(right).dtype)

    assert difference([1.0, 2.0], [1.0, 2.0]) == 0
    assert difference([1.0, 2.5], [1.0, 2.0]) == 0.25
    assert difference([float("nan"), 2.0], [float("nan"), 2.0]) == 0
    assert not difference([float("nan"), 2.0], [1.0, 2.0]) < 1e-4
    assert difference([1 + 1j], [1 + 0j]) == 1
    assert difference([1, 2], [1, 3]) == 1


def test_operations_on_vectors_and_on_single_numbers():
    text = "\tfmla\tv0.4s, v1.4s, v2.4s\n\tfmul\tv3.2d, v1.2d, v2.2d\n\tfmadd\ts0, s1, s2, s3\n\tldr\tq0, [x0]\n"
    assert operations(text) == (2, 1)
