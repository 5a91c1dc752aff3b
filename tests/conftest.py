"""Shared by all tests: run-time checks of the shapes in signatures, one thread pool size, the real corpora's folder."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

# What Numba compiles stays as it is, and so do the wrappers that torch's dispatcher calls: the functions around them
# carry the shapes.
_CHECKED = [
    "recurra.analysis",
    "recurra.cells",
    "recurra.cli",
    "recurra.convert",
    "recurra.data",
    "recurra.evaluation",
    "recurra.gateloop.chunk",
    "recurra.gateloop.modes",
    "recurra.gateloop.operator",
    "recurra.gateloop.polar",
    "recurra.gateloop.softmax",
    "recurra.generation",
    "recurra.huggingface.cache",
    "recurra.huggingface.folder",
    "recurra.huggingface.modeling",
    "recurra.huggingface.tokenizer",
    "recurra.layers",
    "recurra.lengths",
    "recurra.mixers",
    "recurra.models",
    "recurra.saved_state",
    "recurra.scan.associative",
    "recurra.scan.convolution",
    "recurra.scan.linear",
    "recurra.lengths.packed",
    "recurra.scan.reference",
    "recurra.runs",
    "recurra.ssm",
    "recurra.state",
    "recurra.training",
]

if os.environ.get("RECURRA_SHAPE_CHECKS", "1") == "1":
    # Signatures with jaxtyping shapes are enforced. The tests that go through torch.compile run without, for Dynamo
    # cannot trace the checkers.
    from jaxtyping import install_import_hook

    install_import_hook(_CHECKED, "beartype.beartype")

import jaxtyping  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder with the real corpora: $RECURRA_DATA, or shared/data beside the repository."""
    folder = Path(os.environ.get("RECURRA_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs the real corpora: {folder} does not exist; set RECURRA_DATA to their folder")
    return folder


@pytest.fixture
def unchecked(monkeypatch):
    """Bad input is to reach the library's own checks, which the run-time shape checks would forestall."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


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
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
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


@pytest.fixture(params=["interpreter", "card"])
def run_with_triton(request) -> Callable[[Path], None]:
    """Run a file of tests in Triton's interpreter, and on a CUDA card if there is one.

    In a process of its own: whether kernels are interpreted is settled when Triton is first imported. Without the
    run-time shape checks, for such a file may have its functions compiled.
    """
    pytest.importorskip("triton", reason="Triton is not installed here")
    if request.param == "card" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA card")

    def run(file: Path) -> None:
        interpreted = "1" if request.param == "interpreter" else "0"
        chosen = {"TRITON_INTERPRET": interpreted, "RECURRA_SHAPE_CHECKS": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)]
        result = subprocess.run(command, env=os.environ | chosen, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stdout + result.stderr

    return run
