"""What the tests of the scans share: a plain loop to compare with, numbers to draw, programs in a fresh process."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from torch import Tensor

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def unchecked(monkeypatch):
    """Bad input is to reach the library's own checks, which the run-time shape checks would forestall."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def plain_scan() -> Callable[..., Tensor]:
    """The recurrence as a NumPy loop in double precision, for any shapes that broadcast: a test's own arithmetic."""

    def scan(a: Tensor, b: Tensor, h0: Tensor | None = None, reverse: bool = False) -> Tensor:
        is_complex = any(x is not None and x.is_complex() for x in (a, b, h0))
        wide = torch.complex128 if is_complex else torch.float64
        numbers = lambda x: x.detach().to(wide).resolve_conj().resolve_neg().numpy()  # noqa: E731
        a_, b_ = numbers(a.expand(b.shape)), numbers(b)
        h = np.zeros_like(b_[:, 0]) if h0 is None else numbers(h0)
        states = np.empty_like(b_)
        for t in sorted(range(b_.shape[1]), reverse=reverse):
            h = a_[:, t] * h + b_[:, t]
            states[:, t] = h
        return torch.from_numpy(states)

    return scan


@pytest.fixture(scope="session")
def gates() -> Callable[..., Tensor]:
    """Draw gates of magnitude below 1, with a phase where they are complex."""

    def draw(*shape: int, dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> Tensor:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return (torch.randn(shape, dtype=wide) * 0.5).tanh().to(dtype).requires_grad_(requires_grad)

    return draw


@pytest.fixture
def poisoned_memory():
    """Fill every fresh tensor with NaN, so that an element that nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def run_python(tmp_path) -> Callable[..., str]:
    """Run a program in a fresh interpreter and return what it printed; a crash fails the test and not the run."""

    def run(program: str, **environment: str) -> str:
        variables = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result.stdout + result.stderr

    return run
