"""Whatever call to the disk fails while a checkpoint is saved, the last one can be loaded."""

import pytest
import torch
from benchmarks.faults.disk import FaultyDisk

from recurra.train.checkpoint import CheckpointFolder
from recurra.train.run_folder import RunFolder


def payload(step):
    return {"position": {"step": step}, "model": {"weight": torch.arange(5000.0) + step}, "average": None}


@pytest.fixture
def run(tmp_path):
    """A run with the checkpoints of steps 1 and 2, of which the next save deletes the first."""
    run = RunFolder(tmp_path / "run")
    for step in (1, 2):
        CheckpointFolder(run.checkpoints).save(step, payload(step))
    return run


def last(checkpoints):
    """The step of the last checkpoint, which was read whole."""
    path, saved = checkpoints.load("last")
    step = saved["position"]["step"]
    assert path.name == f"step-{step:010d}.safetensors"
    return step


def test_the_calls_are_those_that_replace_a_file(run):
    with FaultyDisk(run.path) as disk:
        CheckpointFolder(run.checkpoints).save(3, payload(3))
    calls = [call for call in disk.calls if call != "write"]
    assert disk.calls.count("write") >= 2
    # the file, what replaces the old file, its folder, two files that are not needed any more
    assert calls == ["open", "fsync", "rename", "open", "fsync", "unlink", "unlink"]


@pytest.mark.parametrize("fault", ["once", "full", "killed"])
def test_the_last_checkpoint_can_be_loaded_whatever_fails(run, fault):
    checkpoints = CheckpointFolder(run.checkpoints)
    before = {path: path.read_bytes() for path in checkpoints.steps()}
    with FaultyDisk(run.path) as disk:
        checkpoints.save(3, payload(3))
    for number in range(len(disk.calls)):
        checkpoints.drop_after(2)
        for path, content in before.items():
            path.write_bytes(content)
        failed = None
        with FaultyDisk(run.path, number, fault) as faulty:
            try:
                checkpoints.save(3, payload(3))
            except BaseException as error:
                failed = error
        assert fault == "full" or failed is not None
        assert fault == "killed" or isinstance(failed, (OSError, type(None))), "no error of PyTorch's"
        assert last(checkpoints) == (3 if "rename" in faulty.calls[:number] else 2)
        run.lock()
        run.unlock()
        assert not list(run.checkpoints.glob(".*")), "what was left is removed before the run goes on"
