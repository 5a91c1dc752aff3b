"""The fused Triton kernels in a process of its own: that they are interpreted is settled when Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recurra import gate_loop

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("where", ["interpreter", "card"])
def test_the_kernels(where):
    pytest.importorskip("triton", reason="Triton is not installed here")
    if where == "card" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA card")
    variables = {**os.environ, "TRITON_INTERPRET": "1" if where == "interpreter" else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / "interpreted_triton.py")]
    result = subprocess.run(command, env=variables, cwd=HERE.parents[1], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def test_refused_on_the_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.ones(2, 5, 3, 1)
    with pytest.raises(RuntimeError, match=r'backend="triton" (runs on CUDA, and the tensors are on cpu|cannot run)'):
        gate_loop(x, x, x, x, backend="triton")
