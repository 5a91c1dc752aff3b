"""Modules, streams, scores and training runs on another device than the CPU, without one."""

from pathlib import Path

import pytest
from tests.processes import Program
from torch.utils import backend_registration

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}]
from tests.devices.elsewhere import register
register()
from tests.devices.evaluation import check_evaluation
from tests.devices.modules import check_modules
from tests.devices.streams import check_streams
from tests.devices.training import check_training
check_modules({every})
check_streams(Path({folder!r}))
check_evaluation()
check_training(Path({folder!r}))
"""


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_runs_there_is_what_runs_on_the_cpu(tmp_path, every):
    """In a process of its own, for which the device is registered."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this PyTorch cannot register a device in Python")
    given = {"OMP_NUM_THREADS": "1", "RECURRA_SHAPE_CHECKS": "0"}
    ended = Program(PROGRAM.format(root=str(ROOT), folder=str(tmp_path), every=every), tmp_path, **given).wait(300)
    assert ended.status == 0, ended.said
