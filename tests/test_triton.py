"""The Triton kernels beside the reference: in Triton's interpreter, and on a CUDA card if there is one."""

from pathlib import Path

import pytest
import torch
from tests.processes import Program

HERE = Path(__file__).resolve().parent
FILES = [
    "ops/scan/interpreted_triton.py",
    "ops/gate_loop/interpreted_triton.py",
    "ops/gate_loop/interpreted_triton_chunk.py",
    "ops/cells/interpreted_triton_gru.py",
    "ops/selective_scan/interpreted_triton.py",
    "ops/delta_rule/interpreted_triton.py",
    "ops/interpreted_triton_causality.py",
]


@pytest.mark.parametrize(
    ("where", "which"),
    [
        ("interpreter", "not slow"),
        pytest.param("interpreter", "slow", marks=pytest.mark.slow, id="interpreter, the rest"),
        ("card", ""),
    ],
)
def test_the_kernels(where, which):
    """The files of tests of the kernels in a process of their own, whose report a failure shows.

    Whether kernels are interpreted is settled when Triton is first imported. Without the run-time shape checks, for
    such a file may have its functions compiled.
    """
    pytest.importorskip("triton", reason="Triton is not installed here")
    if where == "card" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA card")
    arguments = ["-p", "no:cacheprovider", "-m", which, *(str(HERE / file) for file in FILES)]
    chosen = {
        "TRITON_INTERPRET": "1" if where == "interpreter" else "0",
        "RECURRA_SHAPE_CHECKS": "0",
        "OMP_NUM_THREADS": "1",
    }
    ended = Program(f"import pytest, sys; sys.exit(pytest.main({arguments}))", HERE.parent, **chosen).wait(600)
    assert ended.status == 0, ended.said
