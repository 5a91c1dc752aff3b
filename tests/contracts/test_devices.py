"""No module makes tensors on the CPU that it needs on its own device."""

from pathlib import Path

import pytest
from tests.processes import Program
from torch.utils import backend_registration

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
sys.path[:0] = [{root!r}]
from tests.contracts.fake_device import main
sys.exit(main())
"""


def test_every_module_stays_on_its_device(tmp_path):
    """On a device made up for a process; backward passes would need a real one."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this PyTorch cannot register a device in Python")
    given = {"OMP_NUM_THREADS": "1", "RECURRA_SHAPE_CHECKS": "0"}
    ended = Program(PROGRAM.format(root=str(ROOT)), tmp_path, **given).wait(300)
    assert ended.status == 0, ended.said
